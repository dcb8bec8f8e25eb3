"""The routes of the REST API, a module for each subject."""
