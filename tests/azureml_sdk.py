"""Run by the Python that has AzureML's SDK: what it says of the job in each file, as JSON; empty where it takes it."""

import json
import sys

from azure.ai.ml import load_job  # type: ignore[import-not-found]


def refusal(path: str) -> str:
    try:
        job = load_job(path)
        job._to_rest_object()  # what would be sent
        return str(job._validate().error_messages or "")
    except Exception as error:
        return str(error) or type(error).__name__


print(json.dumps({path: refusal(path) for path in sys.argv[1:]}))
