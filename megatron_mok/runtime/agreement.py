"""What may fail on one rank alone, done on all: no rank waits for one that has raised."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..errors import of_peer
from ..reference.exchange import Exchange


def on_all(ranks: Exchange, act: Callable[[], Any]) -> list[Any]:
    """act()'s result (a JSON value) of every rank, by rank. Collective.

    If it raised on any rank there is an error on all: on that rank its own, also where the peers could not be
    told, and on the others one that names the rank and the cause.
    """
    mine: Exception | None = None
    try:
        said = {"result": act()}
    except Exception as error:  # told to the peers, then raised
        mine = error
        said = {"error": [type(error).__name__, str(error)]}
    try:
        every = [json.loads(text) for text in ranks.gather_bytes(json.dumps(said).encode())]
    except Exception as error:
        if mine is None:
            raise
        raise mine from error
    if mine is not None:
        raise mine
    for rank, theirs in enumerate(every):
        if "error" in theirs:
            raise of_peer(rank, *theirs["error"])
    return [theirs["result"] for theirs in every]
