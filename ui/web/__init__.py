"""The page in a browser, over the service and its events. Knows no model and no engine."""
