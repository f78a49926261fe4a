"""The report as pages: one of HTML, and one in GitHub's Markdown."""
