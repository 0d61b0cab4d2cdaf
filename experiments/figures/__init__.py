"""What figures share: the page, lines with bands over seeds, a run's learning curve."""
