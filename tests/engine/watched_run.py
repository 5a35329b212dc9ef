"""`cotrain` that reads back, after every update, what each engine serves: a line of the file in WATCHED for each.

FLIP=VERSION: a byte of that drafter version is flipped on the node of the controller.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cotrain.actors.engines import RolloutEngines
from cotrain.records import SwapReport, WeightPayload
from cotrain.transport.nodes import Coming, Nodes
from pipelines.cli import main


def watch(method: str, draft: bool) -> None:
    update, arrived = getattr(RolloutEngines, method), Nodes.arrived

    def flipped(nodes: Nodes, coming: Coming) -> str:
        there = arrived(nodes, coming)
        if coming.reference is not None:
            flip_a_byte(there)
        return there

    def watched(engines: RolloutEngines, payload: WeightPayload, version: int, *rest: Any) -> SwapReport:
        try:
            with patch.object(
                Nodes, "arrived", flipped if draft and os.environ.get("FLIP") == str(version) else arrived
            ):
                return update(engines, payload, version, *rest)
        finally:
            served = engines.served_digests(sorted(payload.digests), draft)
            note(update=method, version=version, sent=payload.digests, served=served)

    setattr(RolloutEngines, method, watched)


def watch_return() -> None:
    come_back = RolloutEngines.come_back

    def watched(engines: RolloutEngines, engine: int) -> None:
        come_back(engines, engine)
        current, versions = engines._current, engines._current.versions
        for payload, version, draft in (
            (current.policy, versions.policy, False),
            (current.drafter, versions.drafter, True),
        ):
            assert payload is not None
            served = engines.served_digests(sorted(payload.digests), draft)
            note(update="come_back", version=version, sent=payload.digests, served=served, engine=engine)

    RolloutEngines.come_back = watched  # type: ignore[method-assign]


def note(**row: Any) -> None:
    with Path(os.environ["WATCHED"]).open("a") as file:
        file.write(json.dumps(row | {"time": time.time()}) + "\n")


def flip_a_byte(path: str) -> None:
    """Of a weight, not of the file's header."""
    with Path(path).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


if __name__ == "__main__":
    watch("update_policy", draft=False)
    watch("update_drafter", draft=True)
    watch_return()
    sys.exit(main())
