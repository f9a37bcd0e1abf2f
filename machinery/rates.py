"""Who waits for whom in a run, and how many tokens a second are sampled and trained on."""

from machinery.compute import Compute
from machinery.feed import Feed


class Rates:
    """Counts from one training line of the log to the next, without the time of validations."""

    def __init__(self, compute: Compute, feed: Feed):
        self.compute, self.feed = compute, feed
        self.last = {"seconds": 0.0, "busy": 0.0, "tokens": 0}  # what `_counters` said at the last line
        self.waited = 0.0  # seconds that the trainer has waited for groups, in this process
        self.generated = 0.0  # seconds that a generator was busy on average, in this process
        self.unlogged_busy = 0.0  # the part of `generated` that no line of the log has counted yet
        self.speeds = ""  # of the last line, in words

    def columns(self, batch_tokens: int, waited: float) -> dict:
        """Log columns of what has happened since the last line. batch_tokens: sampled tokens of the batch that was
        trained on, filtered groups included. waited: seconds that the trainer has waited for it."""
        now, generators = self._counters(), len(self.feed.engines)
        change = {name: value - self.last[name] for name, value in now.items()}
        self.last = now
        self.waited += waited
        # A report may cover more time than this line does. The next line counts what is left.
        self.generated += change["busy"] / generators
        self.unlogged_busy += change["busy"] / generators
        busy = min(self.unlogged_busy, change["seconds"])
        self.unlogged_busy -= busy
        sampled_per_second = generators * change["tokens"] / change["busy"] if change["busy"] else None
        trained_per_second = batch_tokens / max(change["seconds"] - waited, 1e-9)
        self.speeds = f"tokens/s {sampled_per_second or 0:,.0f} sampled {trained_per_second:,.0f} trained"
        return {
            "trainer_idle_fraction": waited / change["seconds"],
            "generator_idle_fraction": 1 - busy / change["seconds"],
            "generator_tokens_per_second": sampled_per_second,
            "trainer_tokens_per_second": trained_per_second,
        }

    def skip_generation(self) -> None:
        """Count in the next line only what the generators do from now on."""
        now = self._counters()
        self.last |= {"busy": now["busy"], "tokens": now["tokens"]}

    def idle(self) -> str:
        """How long trainer and generators have waited so far, as shares of the time of training."""
        seconds = max(self.compute.seconds, 1e-9)
        generators = max(0.0, 1 - self.generated / seconds)
        return f"trainer {self.waited / seconds:.2f}, generators {generators:.2f} of the time"

    def _counters(self) -> dict:
        return {"seconds": self.compute.seconds, "busy": self.feed.busy_seconds, "tokens": self.feed.sampled_tokens}
