"""Which rows of reused pictures are computed in which layers: the choices that are compared."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# (layers, rows of the picture, largest deviation last: int64 [rows]) -> bool [layers, rows]
Choose = Callable[[int, int, Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """A choice under the name it has in tables."""

    name: str
    choose: Choose


def leading(ratio: float) -> Choose:
    """What the engine does."""
    return lambda layers, rows, _: _same(layers, rows, torch.arange(math.ceil(ratio * rows)))


def last(ratio: float) -> Choose:
    return lambda layers, rows, _: _same(layers, rows, torch.arange(rows - math.ceil(ratio * rows), rows))


def evenly(ratio: float) -> Choose:
    def choose(layers: int, rows: int, _: Tensor) -> Tensor:
        count = math.ceil(ratio * rows)
        return _same(layers, rows, (torch.arange(count) + 0.5) * rows / count)
    return choose


def deviating(ratio: float) -> Choose:
    """The rows whose keys differ most from the reused ones in the first layer in which they do, told for nothing."""
    return lambda layers, rows, order: _same(layers, rows, order[rows - math.ceil(ratio * rows):])


def deviating_paid(ratio: float) -> Choose:
    """The same at the cost of `ratio` in all: the first layer computes every row, which is what it takes to tell."""
    def choose(layers: int, rows: int, order: Tensor) -> Tensor:
        rest = max(0.0, ratio * layers - 1) / (layers - 1)
        return _same(layers, rows, order[rows - round(rest * rows):]) | _layers(layers, rows, 0, 1)
    return choose


def lower_layers(count: int) -> Choose:
    """Every row in the first `count` layers, none above."""
    return lambda layers, rows, _: _layers(layers, rows, 0, count)


def upper_layers(count: int) -> Choose:
    """Every row in the last `count` layers, on hidden states that saw reused KV below: as KV that is the reverse, but
    nothing is saved, since the hidden states have to be computed."""
    return lambda layers, rows, _: _layers(layers, rows, layers - count, layers)


def at_equal_cost(num_layers: int) -> list[Choice]:
    """Shares of the rows of all layers that leading rows take as well."""
    choices = []
    for ratio in (0.05, 0.125, 0.25):
        rows = {"leading": leading, "evenly spaced": evenly, "last": last, "largest deviation": deviating}
        if ratio * num_layers > 1:
            rows["deviation, paid"] = deviating_paid
        choices += [Choice(f"{name} {ratio}", choose(ratio)) for name, choose in rows.items()]
        count = round(ratio * num_layers)
        if count and count == ratio * num_layers:
            choices += [Choice(f"lower layers {ratio}", lower_layers(count)),
                        Choice(f"upper layers {ratio}", upper_layers(count))]
    return choices


def by_layer(num_layers: int) -> list[Choice]:
    """Every row in the layers below each, and every row in those from it on."""
    return ([Choice(f"computed below layer {layer}", lower_layers(layer)) for layer in range(num_layers + 1)]
            + [Choice(f"computed from layer {num_layers - count}", upper_layers(count))
               for count in range(num_layers, 0, -1)])


TABLES: dict[str, Callable[[int], list[Choice]]] = {"rows": at_equal_cost, "layers": by_layer}


def _same(layers: int, rows: int, chosen: Tensor) -> Tensor:
    """The chosen rows in every layer."""
    mask = torch.zeros(layers, rows, dtype=torch.bool)
    mask[:, chosen.long()] = True
    return mask


def _layers(layers: int, rows: int, first: int, stop: int) -> Tensor:
    mask = torch.zeros(layers, rows, dtype=torch.bool)
    mask[first:stop] = True
    return mask
