"""Floor 3: what a run says. Metric names, sinks, judges and the report; it gives verdicts, the loop acts."""
