"""A check of the first record of each source before a run; `prepare` would find the same faults after `base`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rlhf.stages.prepare.dropped_records import undecided
from rlhf.stages.prepare.settings import Config


def faults(config: Config) -> Iterator[str]:
    """Yield a sentence for each source of files with a first record that no output, or more than one, could use."""
    from rlhf.tuning.data import files, tasks
    from rlhf.tuning.data.fields import Mapper
    from rlhf.tuning.data.records import RecordError, parse_line, usable

    sources = config.all_sources()
    for number, source in enumerate(sources):
        if source.source in tasks.NAMES or not files.is_files(source.source):
            continue
        # A file that cannot be read ends `prepare`, with its name.
        with contextlib.suppress(OSError, EOFError, ValueError, ImportError):
            read = ((file, line) for file in files.expand(source.source) for line in files.records_of(file))
            found = next((pair for pair in read if pair[1].strip()), None)
            if found is None:
                yield f"{source.source}: there are no records in it"
                continue
            file, line = found
            mapper = Mapper(source.rename, source.fields)
            try:
                record = parse_line(line, file.label, 1, mapper, config.extra_fields, source.layout, file.kind == "csv")
            except RecordError as error:
                yield f"the first record of {source.source} cannot be used: {error}"
                continue
            fits = [output for output in usable(record) if output in config.splits]
            if len(sources) > 1 and source.uses is None and record.split is None and len(fits) > 1:
                yield undecided(config, number, ", ".join(fits))
