"""Convert masks and weights from one convention to another."""
