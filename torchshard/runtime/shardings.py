"""How each parameter and buffer of a model is split over the mesh, and whether the ranks' slices differ."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchshard.core.layouts import I, Layout, Shard
from torchshard.core.mesh import MODEL
from torchshard.core.sharding import Sharding
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.digests import are_distinct


class Shardings:
    """The shardings of a model's parameters and buffers, by their first names."""

    def __init__(self, ranks: Ranks, of_model: Mapping[str, Layout], of_batch: Mapping[str, Mapping[str, Layout]]):
        """Starts with layouts that the first graph may change.

        Args:
            of_model: the layouts over the model's axis, by name.
            of_batch: the layouts over each data axis, by the axis's name.
        """
        self.ranks = ranks
        self.of_model: dict[str, Layout] = dict(of_model)
        self.of_batch: dict[str, Mapping[str, Layout]] = dict(of_batch)
        self.is_fixed = False
        """Whether a graph has fixed the layouts."""
        self.distinct: dict[str, dict[str, bool]] = {axis: {} for axis in ranks.groups}
        """Axis -> first name -> whether the slices of its ranks differ; if so, equal slices later are an error."""
        self.changes = 0
        """How often layouts or `distinct` have changed."""

    def of(self, name: str) -> Sharding:
        """Returns the sharding of the parameter or buffer with this first name."""
        axes = {MODEL: self.of_model, **self.of_batch}
        return self.ranks.sharding({axis: layouts.get(name, I) for axis, layouts in axes.items()})

    def local(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's slice of a full tensor."""
        return self.of(name).local(whole, self.ranks.place)

    @property
    def over_data(self) -> dict[str, Layout]:
        """The layouts of the tensors that are split over a data axis, by name."""
        found = (item for of_axis in self.of_batch.values() for item in of_axis.items())
        return {name: layout for name, layout in found if isinstance(layout, Shard)}

    def update(self, layouts: Mapping[str, Layout]) -> None:
        """Sets layouts over the model's axis."""
        self.of_model.update(layouts)
        self.changes += 1

    def fix(self) -> None:
        """Keeps the layouts as they are now: a graph has been captured for them."""
        self.is_fixed = True
        self.changes += 1

    def note_distinct(self, name: str, whole: Tensor) -> None:
        """Notes whether the ranks' slices of a full tensor differ."""
        of = self.of(name)
        for axis, distinct in self.distinct.items():
            distinct[name] = are_distinct(whole, of, self.ranks.place, axis)
        self.changes += 1

    def note_distinct_along(self, axis: str, found: Mapping[str, bool]) -> None:
        """Notes which tensors' slices differ along an axis."""
        self.distinct[axis] |= found
        self.changes += 1
