"""The suite, examined: defective attentions that it must tell from a correct one."""
