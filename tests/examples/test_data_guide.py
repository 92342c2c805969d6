"""What the guide to data sets shows runs, and it lists what there is."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from guides import Guide

from paceline import data
from paceline.data._dataset import _SUFFIXES

GUIDE = Guide("docs/data.md")
UPLOAD = """
import boto3, os
bucket, _, key = {url!r}.removeprefix("s3://").partition("/")
store = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
for file in range(4):
    store.upload_file(f"part-{{file}}.parquet", bucket, f"{{key}}/data/{{file}}.parquet")
"""


@pytest.mark.long
def test_the_code_runs_from_top_to_bottom(s3: str, run_with_torch: Callable[..., Any]) -> None:
    assert "s3://bucket/data" in GUIDE.code()
    from_store = GUIDE.block("s3://bucket/data")
    code = GUIDE.code().replace(from_store, UPLOAD.format(url=s3) + from_store)
    result = run_with_torch(code.replace("s3://bucket", s3))
    assert result.returncode == 0, result.stderr


def test_the_operations_that_are_listed_exist() -> None:
    table = GUIDE.text.partition("| operation | result |")[2].partition("\n\n")[0]
    listed = dict(re.findall(r"^\| `(\w+)\(([^`]*)\)`", table, re.MULTILINE))
    assert len(listed) == 9
    for name, arguments in listed.items():
        parameters = inspect.signature(getattr(data.Dataset, name)).parameters
        assert set(re.findall(r"\w+(?==)", arguments)) <= parameters.keys(), name


def test_every_format_is_listed() -> None:
    table = GUIDE.text.partition("| `format` | suffixes |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", table, re.MULTILINE)
    listed = {suffix: name for name, row in rows for suffix in re.findall(r"`(\.\w+)`", row)}
    assert listed == _SUFFIXES
