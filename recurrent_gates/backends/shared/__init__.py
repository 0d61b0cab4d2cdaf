"""What several backends are made of."""
