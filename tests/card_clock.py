"""Measuring without a card: what a product takes follows from its configuration, and what is read is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from dflash_local.kernels import timing
from dflash_local.kernels.split_kv import DeviceProperties
from dflash_local.kernels.timing import KernelTimer

L2 = 4096  # bytes


class CardClock:
    """In place of a card's: each new configuration is faster than those before.

    Attributes:
        us: of a product, by its configuration. until_warm: all are slower by so much while clocks are low.
        launched: configurations of a repetition. timed: these of each measurement. read: what was read before each.
        warmed: seconds.
    """

    def __init__(self) -> None:
        self.us: dict[object, float] = {}
        self.until_warm = 1.0
        self.launched: list[object] = []
        self.timed: list[tuple[object, ...]] = []
        self.warmed: list[float] = []
        self.read: list[list[torch.Tensor]] = []

    @classmethod
    def plant(cls, monkeypatch: pytest.MonkeyPatch) -> CardClock:
        """In place of the device in ``kernels.timing``."""
        clock = cls()
        monkeypatch.setattr(timing, "replay_ms", clock.replay_ms)
        monkeypatch.setattr(timing, "repeat", clock.repeat)
        monkeypatch.setattr(timing, "device_properties", lambda device: DeviceProperties(99 * 1024, 16, (9, 0), L2))
        seen, evicting = clock.read, timing.evicting

        def noting(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
            seen.append(evicting(weights))
            return seen[-1]

        monkeypatch.setattr(timing, "evicting", noting)
        return clock

    def noting(self, product: Callable[..., Any], config_of: Callable[..., object]) -> Callable[..., Any]:
        """A product that says which configuration was launched."""

        def noted(*args: Any, **named: Any) -> Any:
            self.launched.append(config_of(*args))
            return product(*args, **named)

        return noted

    def replay_ms(self, work: Callable[[], object], replays: int, before: Callable[[], object]) -> float:
        before()
        self.launched.clear()
        work()
        self.timed.append(tuple(self.launched))
        total = sum(self.us.setdefault(config, 1000.0 / (len(self.us) + 1)) for config in self.launched)
        return total * (1 if self.warmed else self.until_warm) / 1e3

    def repeat(self, work: Callable[[], object], seconds: float) -> None:
        work()
        self.warmed.append(seconds)


def timed_again(choose: Callable[[KernelTimer], object], clock: CardClock) -> str:
    """What a further load says."""
    clock.timed.clear()
    timer = KernelTimer()
    choose(timer)
    return timer.notice
