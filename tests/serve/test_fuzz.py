"""Requests made from our own OpenAPI document: whatever comes, the server answers without a 5xx."""

from __future__ import annotations

import os
import warnings

import pytest
from hypothesis import HealthCheck, given, settings

from .tools import running, small_model

CASES = int(os.environ.get("CLEARHEAD_FUZZ", "300"))  # per endpoint


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_no_request_from_the_openapi_document_breaks_the_server() -> None:
    import schemathesis

    with running({"tiny": small_model()}, rows=4, length=64, timeout=5.0) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()

            @settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(case=operation.as_strategy())
            def check(case) -> None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    answer = case.call(timeout=60)
                assert answer.status_code < 500, (case.path, case.body, answer.text)

            check()
