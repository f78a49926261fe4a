"""The suite as pytest tests, and the plugin that gives pytest its options."""

LIMITS = {
    "item-timeout": (60.0, "seconds that an isolated implementation has for one item"),
    "start-timeout": (120.0, "seconds that it has to import itself and its framework"),
    "memory-limit": (8192.0, "MiB of memory that it may use"),
}
"""Option to default and meaning."""

LEVELS = ("core", "full")
"""How much a run asks: see `conformance.running.levels`."""
