"""``swath collect``: from options to a dataset on disk and an exit code."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from swath import platforms
from swath.cli.errors import FAILED, describe, explain_setup
from swath.cli.options import CollectOptions
from swath.cli.policy import import_from_here, split_name
from swath.cli.progress import Screen, make_screen
from swath.cli.stopping import StopRequest
from swath.cli.streams import reader_may_leave, say, short_warnings, stdout_for_result
from swath.cli.target import Target, flush, folder_size

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from swath.cli.build import Setup
    from swath.cli.keeping import Keeper
    from swath.cli.outcome import Outcome
    from swath.cli.writer import DatasetWriter
    from swath.collectors import BaseCollector
    from swath.insight.reading import Reading


def collect(options: CollectOptions) -> int:
    """Run the command; its exit code."""
    target = Target(options.out, options.overwrite)
    stop = StopRequest()
    with stdout_for_result(options.json) as stdout, stop.listening(), short_warnings():
        session = _Session(options, target, stop, stdout)
        try:
            code = session.run()
        except KeyboardInterrupt:
            code = session.left()
        except Exception as error:  # before the first frame, or when saving: what fails in between is an outcome
            code = session.failed(error)
        return code


class _Session:
    def __init__(self, options: CollectOptions, target: Target, stop: StopRequest, stdout: TextIO) -> None:
        self._options = options
        self._target = target
        self._stop = stop
        self._stdout = stdout
        self._screen: Screen = Screen(options)
        self._frames = 0
        #: After a second Ctrl-C.
        self._in_a_hurry = False

    def run(self) -> int:
        self._options.check()
        self._target.check()
        if self._options.trace:
            from swath.cli.keeping import check_trace

            check_trace(self._options.trace)
        if self._options.policy is not None:
            split_name(self._options.policy)
        self._screen = make_screen(self._options)
        self._screen.open()
        import_from_here()
        if self._options.workers is not None and platforms.are_met(*platforms.WORKERS):
            from swath.process.start import server

            server().ensure_running()  # it imports PyTorch while we do
        from swath.cli.build import set_up
        from swath.cli.keeping import Keeper
        from swath.cli.writer import ArrivalWriter, EvenWriter

        options, target = self._options, self._target
        writer_class = EvenWriter if options.evenly else ArrivalWriter
        setup = set_up(options, self._stop)
        try:
            target.check_space(setup.bytes_per_frame * options.frames, is_twice=not options.evenly)
            writer = writer_class(target.beside, options.frames, options.envs, lambda frame: self._begin(setup, frame))
            keeper = Keeper(setup.collector, options, target.beside)
            try:
                outcome = self._collect(setup.collector, writer)
            finally:
                writer.close()
                keeper.end()
            return self._save(outcome, writer, setup, keeper)
        finally:
            with contextlib.suppress(KeyboardInterrupt):  # an env that does not close must not undo what was saved
                setup.collector.shutdown(timeout=0.0 if self._in_a_hurry else None, raise_on_error=False)

    def _begin(self, setup: Setup, frame: TensorDictBase) -> None:
        """What is in ``frame`` will be written: from here on the folder can be opened, even after a kill."""
        from swath.cli.metadata import describe_stored, write_metadata
        from swath.cli.outcome import Outcome

        setup.specs["stored"] = describe_stored(frame)
        nothing = Outcome.of_nothing(self._options.frames, self._options.envs)
        frames_per_batch = setup.collector.requested_frames_per_batch
        write_metadata(self._target.beside, self._options, nothing, frames_per_batch, setup.specs)

    def _collect(self, collector: BaseCollector, writer: DatasetWriter) -> Outcome:
        from swath.cli.outcome import Outcome

        stop, options = self._stop, self._options
        episodes = writer.episodes.statistics
        began = time.perf_counter()
        failure: Exception | None = None
        stop.polite = True
        self._screen.begin(lambda: self._read(collector), self._is_stopping)
        batches = iter(collector)
        while failure is None and not self._is_over:
            try:
                batch = next(batches, None)
            except Exception as error:
                failure, batch = error, collector.partial_batch
            except KeyboardInterrupt:  # the second Ctrl-C: it does not wait for the step
                self._in_a_hurry = True
                batch = collector.partial_batch
            if batch is None or not batch.batch_size.numel():  # TensorDict.numel() is never 0
                break
            try:
                with stop.held_off():
                    writer.add(batch)
            except Exception as error:  # a full disk, say; what was written before is whole
                failure = failure or error
            self._frames = writer.frames
            self._in_a_hurry |= stop.in_a_hurry
        name: Any = None if stop.signal is None else stop.signal.name
        seconds = time.perf_counter() - began
        writer.close()
        return Outcome(
            writer.frames,
            options.frames,
            episodes,
            writer.frames_per_env,
            seconds,
            "error" if failure is not None else name,
            failure,
            max(0, min(options.frames, self._taken(collector)) - writer.frames),
        )

    def _read(self, collector: BaseCollector) -> Reading:
        """Where it stands. In this process, steps are known between two batches, too."""
        reading = collector.reading()
        if self._options.workers is not None or len(reading.places) != 1:
            return reading
        return replace(reading, places=[replace(reading.places[0], frames=self._taken(collector))])

    def _taken(self, collector: BaseCollector) -> int:
        """Frames that there were, delivered or not."""
        if self._options.workers is None:
            return self._stop.steps * self._options.envs
        return sum(worker["frames"] for worker in collector.stats()["workers"])

    def _is_stopping(self) -> bool:
        return self._stop.signal is not None

    @property
    def _is_over(self) -> bool:
        """Envs that advance evenly stop together; of the others each has a part to deliver, until an empty batch."""
        return self._in_a_hurry or (self._is_stopping() and self._options.evenly)

    def _save(self, outcome: Outcome, writer: DatasetWriter, setup: Setup, keeper: Keeper) -> int:
        target = self._target
        frames_per_batch = setup.collector.requested_frames_per_batch
        num_bytes, failure = 0, None
        if writer.frames:
            folder, failure = self._put_together(outcome, writer, setup, keeper)
            num_bytes = folder_size(folder) if failure is None else writer.num_bytes
            with self._stop.held_off():
                target.publish(folder)
        else:
            target.discard()
        self._screen.close()
        self._report(outcome, num_bytes, frames_per_batch, failure)
        return outcome.exit_code

    def _put_together(
        self, outcome: Outcome, writer: DatasetWriter, setup: Setup, keeper: Keeper
    ) -> tuple[Path, OSError | None]:
        """The folder that is the dataset. If one in order cannot be had (a full disk), it is what was written."""
        from swath.cli.metadata import write_metadata

        target, frames_per_batch = self._target, setup.collector.requested_frames_per_batch
        folder = target.beside / "finished"
        try:
            writer.put_together(folder)
            write_metadata(folder, self._options, outcome, frames_per_batch, setup.specs)
            keeper.save(folder)
            flush(folder)
            return folder, None
        except OSError as error:
            failure = error
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # then it says what it said at the beginning
            write_metadata(target.beside, self._options, outcome, frames_per_batch, setup.specs)
        flush(target.beside)
        return target.beside, failure

    def _report(self, outcome: Outcome, num_bytes: int, frames_per_batch: int, disorder: OSError | None = None) -> None:
        from swath.cli.summary import kept_line, print_summary

        options = self._options
        stopped_by = {"SIGINT": "stopped by Ctrl-C; ", "SIGTERM": "stopped by SIGTERM; "}
        if outcome.error is not None:
            self._complain(describe(outcome.error), outcome.error)
        if outcome.error is not None or not outcome.complete:
            say(stopped_by.get(outcome.stopped_by or "", "") + kept_line(outcome, options.out))
        if disorder is not None:
            say(f"it is not in its final form ({disorder.strerror}); swath.load opens it all the same")
        if options.json:
            saved = {"out": options.out, "bytes": num_bytes} if outcome.frames else {"out": None, "bytes": 0}
            self._print_json({**outcome.as_dict(), **saved, "exit_code": outcome.exit_code})
        elif not options.quiet and outcome.frames:
            with reader_may_leave(self._stdout):
                print_summary(self._stdout, options, outcome, num_bytes, frames_per_batch)

    # -- what ends without an outcome ------------------------------------------------------------------------------

    def left(self) -> int:
        """Ctrl-C before the first frame, or again while saving."""
        self._screen.close()
        code = self._stop.exit_code
        self._complain([f"stopped; {self._leftover()}"], None)
        if self._options.json:
            self._print_nothing("stopped", code)
        return code

    def failed(self, error: Exception) -> int:
        self._screen.close()
        lines, code = explain_setup(error, self._options.env_id)
        if self._frames:
            code = FAILED
            lines.append(self._leftover())
        else:
            self._target.discard()
        self._complain(lines, error)
        if self._options.json:
            self._print_nothing("\n".join(lines), code)
        return code

    def _leftover(self) -> str:
        """Say where unfinished files are; they are removed only where there is nothing in them."""
        if self._target.published:
            return f"the frames are saved in {self._options.out}"
        if self._frames:
            beside = self._target.given_beside
            return f"the frames were not moved to {self._options.out}; they are in {beside}, and swath.load opens them"
        self._target.discard()
        return "nothing was saved"

    def _complain(self, lines: list[str], error: BaseException | None) -> None:
        if self._options.traceback and error is not None:
            traceback.print_exception(error, file=sys.stderr)
        first, *rest = lines
        say(f"error: {first}" if error is not None else first)
        for line in rest:
            print(f"  {line}", file=sys.stderr)

    def _print_nothing(self, error: str, code: int) -> None:
        """Nothing was saved, or not where it should be."""
        out = None
        if self._frames:
            out = self._options.out if self._target.published else self._target.given_beside
        self._print_json({"complete": False, "error": error, "frames": self._frames, "out": out, "exit_code": code})

    def _print_json(self, result: dict[str, Any]) -> None:
        with reader_may_leave(self._stdout):
            print(json.dumps({**self._options.identity(), **result}, allow_nan=False), file=self._stdout)
