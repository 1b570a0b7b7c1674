"""What this machine has and what fits on it. Knows no model code; torch only inside one probe."""
