"""What is done to the files of a run, and what must then be found."""

from __future__ import annotations

from chaos.scene import Scene


def require_event(scene: Scene, kind: str, step: int) -> None:
    events = scene.events(kind)
    assert any(event["step"] == step for event in events), f"no {kind} at step {step}: {events}"
