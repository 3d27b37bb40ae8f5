"""Command jobs of Azure Machine Learning: the YAML, checks that its SDK leaves out, and submitting through the SDK."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from bloomery.base.errors import DataError, Problem, RecipeError
from bloomery.config.recipe import AzuremlSection, Recipe
from bloomery.launch.job import ENVIRONMENT, Job, inputs

_SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
_RUN = "${{outputs.run}}"
_INFINIBAND = r"Standard_(H[BCX]\w+|N[CDV]\d+[a-z]*r[a-z]*_\w+)"
"""Sizes whose letters behind the number have an r, and those for high-performance computing."""


def settings(recipe: Recipe) -> AzuremlSection:
    """RecipeError for everything that would be lost or missing on the nodes."""
    section = recipe.launch.azureml if recipe.launch else None
    if section is None:
        rule, remedy = "a job there needs a compute cluster, an environment and a durable place", "add `azureml:` to it"
        raise RecipeError(Problem("launch.azureml is missing", rule, remedy))
    problems = []
    for field, path in inputs(recipe):
        first, *inside = path.split("/")
        if first not in section.inputs or (not inside and field != "tokenizer.path"):
            rule = "nodes see only the folders of launch.azureml.inputs, mounted in the working directory"
            remedy = "add its first folder there: {shards: azureml://datastores/NAME/paths/shards}"
            problems.append(Problem(f"{field} is {path!r}", rule, remedy))
    if problems:
        raise RecipeError(problems)
    return section


def warnings(recipe: Recipe) -> list[Problem]:
    launch = recipe.launch
    assert launch is not None
    sku = launch.azureml and launch.azureml.sku
    if not sku or launch.nodes == 1 or re.fullmatch(_INFINIBAND, sku):
        return []
    rule = f"{launch.nodes} nodes exchange gradients over Ethernet"
    return [Problem(f"{sku} has no InfiniBand", rule, "use a size with an r behind its number, such as ND96asr_v4")]


def document(job: Job, section: AzuremlSection) -> dict[str, Any]:
    """The job's YAML, beside which the recipe lies: both are the `code` that is uploaded."""
    launch = job.section
    mounts = [f"[ -e {name} ] || ln -s ${{{{inputs.{name}}}}} {name}" for name in section.inputs]
    folder = {"type": "uri_folder"}
    services = {str(name): {"type": str(name)} for name in section.services}
    if "tensor_board" in services:
        services["tensor_board"]["log_dir"] = f"{_RUN}/tensorboard"
    environment = {name: value for name, (value, _) in ENVIRONMENT.items()} | launch.env
    is_registered = section.environment.startswith("azureml:")
    return {
        "$schema": _SCHEMA,
        "type": "command",
        "display_name": job.name,
        "experiment_name": section.experiment or job.name,
        "code": ".",
        "command": "\n".join([*mounts, *launch.setup, f"bloomery train recipe.yaml --run-dir {_RUN}"]),
        "environment": section.environment if is_registered else {"image": section.environment},
        "environment_variables": environment,
        **({"inputs": {name: {**folder, "mode": "ro_mount", "path": uri} for name, uri in section.inputs.items()}}
           if section.inputs else {}),
        "outputs": {"run": {**folder, "mode": "rw_mount", "path": section.outputs}},
        "compute": f"azureml:{section.compute}",
        "distribution": {"type": "pytorch", "process_count_per_instance": launch.gpus_per_node},
        "resources": {"instance_count": launch.nodes, "shm_size": section.shm_size},
        **({"limits": {"timeout": int(launch.time_limit.seconds)}} if launch.time_limit else {}),
        **({"services": services} if services else {}),
    }  # fmt: skip


def submit(path: Path, *, follow: bool) -> None:
    """Through the SDK and the workspace of a config.json. Prints the place of the job in the studio, then its log."""
    try:
        from azure.ai.ml import MLClient, load_job  # type: ignore[import-untyped]
        from azure.identity import DefaultAzureCredential
    except ImportError:
        by_hand = f"az ml job create --file {shlex.quote(str(path))}"
        rule = f"the file is written; `{by_hand}` submits it as well"
        raise DataError(
            Problem("azure-ai-ml is not installed", rule, "run `pip install azure-ai-ml azure-identity`")
        ) from None
    try:
        client = MLClient.from_config(DefaultAzureCredential())
        job = client.jobs.create_or_update(load_job(path))
        print(f"submitted: {job.studio_url}", flush=True)
        if follow:
            client.jobs.stream(job.name)
    except Exception as error:  # the SDK has dozens of kinds
        raise DataError(
            Problem(f"AzureML reports: {str(error)[:300]}", remedy="see `az login`, or the job's page")
        ) from error
