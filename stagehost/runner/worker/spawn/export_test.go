package spawn

// CutLifeline does what the end of the host does to the lifeline.
func (s *Spawner) CutLifeline() error { return s.lifeline.write.Close() }
