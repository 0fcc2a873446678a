package modelcache

import "github.com/stagemesh/stagemesh/mesh/model"

// Lost returns the memory of failed unloads.
func (c *Cache) Lost() model.Size { return sub(c.settings.Capacity, c.capacity) }
