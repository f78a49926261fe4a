"""Convert masks, windows, soft caps and weights from one convention to another."""
