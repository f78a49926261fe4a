"""The suite as pytest tests, and the plugin that gives pytest its options."""
