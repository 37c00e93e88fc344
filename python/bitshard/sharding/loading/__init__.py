"""Models that are loaded so that no rank holds them whole."""
