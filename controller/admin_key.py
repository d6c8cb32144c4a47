"""The secret that gateway, controller and operators share. A module of its own, because a command that only sends the
secret starts four times as fast without the rest of the fleet file."""

ADMIN_KEY_VARIABLE = "HEDDLE_ADMIN_KEY"
