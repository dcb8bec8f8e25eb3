"""What every request passes before its route."""
