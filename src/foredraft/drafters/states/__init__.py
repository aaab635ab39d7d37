"""What drafters keep of each row between steps."""
