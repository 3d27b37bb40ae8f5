"""Floor 3: what a run says. Metric names, meters, sinks and the report; it gives verdicts, the loop acts."""
