class EventHandle:
    pass


class EventOverlap:
    def __init__(self, event=None):
        self.event = event
