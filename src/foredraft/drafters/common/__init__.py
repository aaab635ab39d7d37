"""What several drafters share: draft runners, head features, tree building, templates."""
