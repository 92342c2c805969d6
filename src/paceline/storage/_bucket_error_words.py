"""Words of what the client of a bucket raises."""

import html
import re

from paceline.storage._upload import Upload

_PART = re.compile(r"[?&]partNumber=(\d+)")
_BEGINNING = re.compile(r"[?&]uploads\b")
# The answer of a store that refuses a request, and what it says there.
_XML = re.compile(r"<\?xml|<Error>")
_SAID = re.compile(r"<(?:Code|Message)>(.*?)</", re.DOTALL)
_STORE_NAME = re.compile(r"^Generic \w+ error: ")


def words_of(text: str) -> str:
    """Return the first line of an error, and of an answer in XML what a store says in it."""
    # After it, the client tells the same once more.
    text = text.partition("\n\nDebug source:")[0]
    if said := _SAID.findall(text):
        told = (html.unescape(each.strip().splitlines()[0]) for each in said if each.strip())
        text = ": ".join([_XML.split(text)[0].rstrip(" :\n\ufeff"), *told])
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return _STORE_NAME.sub("", line).rstrip(".")


def part_of(text: str, upload: Upload) -> str:
    """Return the part of a file that an error is about."""
    found = _PART.search(text)
    if found is not None:
        return f"part {found[1]} of {upload.num_parts}"
    if upload.num_parts == 1:
        return "part 1 of 1"
    where = "before part 1" if _BEGINNING.search(text) else "a part"
    return f"{where} of {upload.num_parts}"
