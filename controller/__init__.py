"""The only writer of the fleet: launches, relaunches and stops engine servers as the gateway's demand changes."""
