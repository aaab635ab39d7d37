"""The bodies of requests in the OpenAPI document. FastAPI does not know them, as it does not read them."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_PLACE = "#/components/schemas/{model}"


def describe_bodies(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Add the bodies, by path, to the document of an application."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = described()
            places, found = models_json_schema([(each, "validation") for each in bodies.values()], ref_template=_PLACE)
            for path, kind in bodies.items():
                content = {"application/json": {"schema": places[kind, "validation"]}}
                document["paths"][path]["post"]["requestBody"] = {"content": content, "required": True}
            document["components"]["schemas"] |= found["$defs"]
        return described()

    app.openapi = openapi
