"""The pipeline of a Trainer class: schedule, mesh and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeropipe.core.mesh import EXPERTS, format_mesh, num_processes, parse_mesh
from zeropipe.core.schedule import Schedule
from zeropipe.core.units import count_text
from zeropipe.engine.options import Options
from zeropipe.errors import ConfigError, short
from zeropipe.schedules.user import load


@dataclass(frozen=True)
class PipelineSettings:
    """The arguments of `pipelined`, checked."""

    schedule: str | Schedule
    mesh: Mapping[str, int]
    microbatches: int | None
    layers: Sequence[int] | None
    options: Mapping[str, Any]

    @staticmethod
    def create(
        schedule: str | Schedule,
        mesh: str | Mapping[str, int],
        microbatches: int | None,
        layers: Sequence[int] | None,
        options: dict[str, Any],
    ) -> PipelineSettings:
        """ConfigError for an invalid value."""
        if not isinstance(schedule, str | Schedule):
            raise ConfigError(f"schedule={short(schedule)}: must be a name, a file, or a zp.Schedule")
        if not isinstance(mesh, str | Mapping):
            raise ConfigError(f"mesh={short(mesh)}: must be sizes by dimension, like {{'pp': 2, 'dp_shard': 2}}")
        sizes = dict(parse_mesh(mesh if isinstance(mesh, str) else format_mesh(mesh)))
        if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
            raise ConfigError(f"microbatches={short(microbatches)}: must be a positive integer, or None")
        Options.of(dict(options)).check()
        return PipelineSettings(schedule, {"pp": 1, **sizes}, microbatches, layers, options)

    @property
    def num_processes(self) -> int:
        """The number of processes of the mesh."""
        return num_processes(tuple(self.mesh.items()))

    @property
    def dimensions(self) -> dict[str, int]:
        """The dimensions of the mesh of processes: pp, and the others of more than one process."""
        return {n: size for n, size in self.mesh.items() if n != EXPERTS and (size > 1 or n == "pp")}

    @property
    def ep(self) -> int:
        """The number of processes that experts are divided over."""
        return self.mesh.get(EXPERTS, 1)

    def build_schedule(self, num_microbatches: int) -> Schedule:
        """The schedule, for a number of microbatches."""
        if isinstance(self.schedule, Schedule):
            found = self.schedule
        else:
            found = load(self.schedule, ranks=self.mesh["pp"], microbatches=num_microbatches)
        if found.num_ranks != self.mesh["pp"]:
            raise ConfigError(
                f"the schedule {found.name} is for {count_text(found.num_ranks, 'rank')}, the mesh has "
                f"pp={self.mesh['pp']}: use the same number"
            )
        return found
