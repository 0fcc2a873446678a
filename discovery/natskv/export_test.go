package natskv

import "time"

// DeleteWait is how long the broker may take to remove the files of a deleted stream.
const DeleteWait = deleteWait

// SetMarkerTTL sets how long the markers of deleted entries stay. Call it before Run.
func SetMarkerTTL(s *Store, ttl time.Duration) { s.markerTTL = ttl }
