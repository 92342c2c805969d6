"""The page that documents the REST API: plain HTML without scripts, made from its description."""

import base64
import hashlib
import json
from functools import lru_cache
from html import escape
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from paceline.master._answer_headers import API_POLICY
from paceline.master.api._api_router import ApiRouter
from paceline.master.api._scopes import PREFIX, Scopes

router = ApiRouter(include_in_schema=False)

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 13px; }
pre { overflow-x: auto; padding: .5rem; border: 1px solid #8886; border-radius: 4px; }
details { border-top: 1px solid #8886; padding: .4rem 0; }
summary { cursor: pointer; }
.method { display: inline-block; width: 4.5rem; font-weight: 600; }
.scope { float: right; opacity: .7; }
table { border-collapse: collapse; }
td { padding: .15rem 1rem .15rem 0; vertical-align: top; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = f"{API_POLICY}; style-src 'sha256-{_STYLE_HASH}'"


@router.get("/docs", response_class=HTMLResponse)
async def read_docs(request: Request) -> HTMLResponse:
    """Show all routes, their scopes, parameters, bodies and answers."""
    description = json.dumps(request.app.openapi())
    return HTMLResponse(_page(description), headers={"Content-Security-Policy": _POLICY})


@lru_cache(maxsize=1)
def _page(description: str) -> str:
    api = json.loads(description)
    scopes = Scopes()
    groups: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            scope = scopes.access(method.upper(), path).scope.value
            tag = operation.get("tags", ["other"])[0]
            groups.setdefault(tag, []).append(_docs_of_operation(method, path, operation, scope))
    parts = [f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in groups.items()]
    models = api.get("components", {}).get("schemas", {})
    parts.append("<h2>models</h2>")
    parts += [
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"{_json(model)}</details>"
        for name, model in sorted(models.items())
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Paceline REST API'
        f"</title><style>{_STYLE}</style></head><body><h1>Paceline REST API"
        f" {escape(api['info']['version'])}</h1><p>Programs send <code>Authorization: Bearer TOKEN"
        "</code>. At the right of each route is the scope that its token needs. The same as data:"
        f' <a href="{PREFIX}/openapi.json">openapi.json</a>.</p>{"".join(parts)}</body></html>'
    )


def _docs_of_operation(method: str, path: str, operation: dict[str, Any], scope: str) -> str:
    parameters = "".join(
        f"<tr><td><code>{escape(one['name'])}</code></td><td>{escape(one['in'])}"
        f"{', required' if one.get('required') else ''}</td>"
        f"<td>{escape(one.get('description', ''))}</td><td>{_json(one.get('schema'))}</td></tr>"
        for one in operation.get("parameters", ())
    )
    body = operation.get("requestBody", {}).get("content")
    answers = {
        status: answer["content"]
        for status, answer in operation["responses"].items()
        if answer.get("content") and status.startswith("2")
    }
    return (
        f'<details><summary><span class="method">{method.upper()}</span><code>{escape(path)}</code>'
        f'<span class="scope">{scope}</span></summary><p>{escape(operation["description"])}</p>'
        + (f"<table>{parameters}</table>" if parameters else "")
        + (f"<h4>Body</h4>{_json(body)}" if body else "")
        + "".join(f"<h4>Answer {status}</h4>{_json(found)}" for status, found in answers.items())
        + "</details>"
    )


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=1))}</pre>"
