"""The ``weft`` command: composes the processes of the service and offers the operator's commands."""
