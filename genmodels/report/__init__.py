"""report.html: what was measured, as one page that opens anywhere; and the JSON schema of report.json."""

from genmodels.report.compare import render, write_page

__all__ = ["render", "schema", "write_page"]


def schema() -> dict:
    """The JSON schema of report.json, made from the dataclasses of `genmodels.evaluation.report`.

    Keys beyond those of the schema are allowed. A number is null where the value is not finite.

    Example:
        >>> schema()["properties"]["likelihood"]["items"]["anyOf"][0]
        {'$ref': '#/$defs/BitsLine'}
    """
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    from genmodels.evaluation.report import Report

    class AsWritten(GenerateJsonSchema):
        """Numbers may be null, and fields that are None by default are left out, as `plain` writes them."""

        def float_schema(self, schema: dict) -> dict:
            return {"type": ["number", "null"]}

        def field_is_required(self, field: dict, total: bool) -> bool:
            return field["schema"].get("default", ...) is not None

        def union_schema(self, schema: dict) -> dict:
            found = super().union_schema(schema)
            if any("$ref" in choice for choice in found.get("anyOf", [])):
                for choice in found["anyOf"]:
                    if choice | {"additionalProperties": True} == {"type": "object", "additionalProperties": True}:
                        choice["maxProperties"] = 0  # of a stage that was not run
            return found

    return {"$schema": AsWritten.schema_dialect, **TypeAdapter(Report).json_schema(schema_generator=AsWritten)}
