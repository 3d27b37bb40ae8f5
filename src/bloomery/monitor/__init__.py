"""Floor 3: what a run reports. Metric names, meters, sinks, TensorBoard and the HTML report."""
