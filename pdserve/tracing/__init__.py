"""What processes remember of requests, and how that becomes timelines and OpenTelemetry spans."""
