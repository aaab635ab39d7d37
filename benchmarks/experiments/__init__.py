"""One module an experiment, or a few that share their measurement: question, cells, measurement and tables."""
