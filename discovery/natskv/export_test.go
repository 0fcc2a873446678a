package natskv

import "time"

// SetMarkerTTL changes how long a store that does not run yet will know that an entry
// was deleted.
func SetMarkerTTL(s *Store, ttl time.Duration) { s.markerTTL = ttl }
