"""A look at the first records of each source before a run: `prepare` finds the same faults once the base is made."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from stages.prepare.lost import undecided
from stages.prepare.settings import Config

FIRST = 100
"""Records that are read of a source's first file."""


def faults(config: Config) -> Iterator[str]:
    """A sentence for each source of files of which no record can be used, or that has to state its use and does not."""
    from tuning.data import files, tasks
    from tuning.data.fields import Mapper
    from tuning.data.records import RecordError, parse_line, usable

    sources = config.all_sources()
    for number, source in enumerate(sources):
        if source.source in tasks.NAMES or not files.is_files(source.source):
            continue
        mapper, wrong, fits = Mapper(source.rename, source.fields), list[str](), dict[str, int]()
        records = 0
        # A file that cannot be read ends `prepare`, with its name.
        with contextlib.suppress(OSError, EOFError, ValueError, ImportError):
            file = files.expand(source.source)[0]
            lines = files.records_of(file)
            for records, line in enumerate(itertools.islice(filter(bytes.strip, lines), FIRST), start=1):
                try:
                    settings = mapper, config.extra_fields, source.layout, file.kind == "csv"
                    record = parse_line(line, file.label, records, *settings)
                except RecordError as error:
                    wrong.append(str(error))
                    continue
                outputs = [output for output in usable(record) if output in config.splits]
                if record.split is None and len(outputs) > 1:
                    fits[", ".join(outputs)] = 1
        if wrong and len(wrong) == records:
            yield f"none of the first {records} records of {source.source} can be used: {wrong[0]}"
        elif fits and source.uses is None and len(sources) > 1:
            yield undecided(config, number, next(iter(fits)))
