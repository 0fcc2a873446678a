package natskv

import "time"

// SetMarkerTTL sets how long the markers of deleted entries stay. Call it before Run.
func SetMarkerTTL(s *Store, ttl time.Duration) { s.markerTTL = ttl }
