package models

import (
	"context"
	"errors"
	"hash/fnv"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

// AliasChange is what SetAlias makes of an alias.
type AliasChange struct {
	Name  model.ID
	Route *meshv1.AliasRoute
	// Owner is the one that the alias has, or gets.
	Owner string
	// ExpectModel is the model that the alias has to have; empty takes any. If it is the route's
	// model, the alias may also be missing.
	ExpectModel model.ID
	// UpdateOnly fails where there is no alias.
	UpdateOnly bool
	// Force switches to a model that is not loaded, too.
	Force bool
	// AutoDelete unregisters the route's model when no alias points at it any more.
	AutoDelete bool
}

// maxWeights is how many models an alias has besides the first.
const (
	maxWeights = 16
	maxPercent = 100
)

// Validate checks a change, and returns INVALID_REQUEST with the field.
func (in AliasChange) Validate() error {
	ids := map[string]model.ID{"name": in.Name, "route.model": model.ID(in.Route.GetModel())}
	if in.Owner != "" {
		ids["owner"] = model.ID(in.Owner)
	}
	if in.ExpectModel != "" {
		ids["expect_model"] = in.ExpectModel
	}
	shadow := in.Route.GetShadow()
	if shadow != nil {
		ids["route.shadow.model"] = model.ID(shadow.GetModel())
	}
	total := uint32(0)
	for id, weight := range in.Route.GetWeights() {
		if total += min(weight, maxPercent+1); weight == 0 || total > maxPercent || id == in.Route.GetModel() {
			return fault.InField(fault.InvalidRequest, "route.weights", "these are percents for models besides the route's, at most %d together", maxPercent)
		}
		if err := model.ID(id).Validate(); err != nil {
			return fault.InField(fault.InvalidRequest, "route.weights", "%w", err)
		}
	}
	if n := len(in.Route.GetWeights()); n > maxWeights {
		return fault.InField(fault.InvalidRequest, "route.weights", "%d models, at most %d are possible", n, maxWeights)
	}
	if shadow != nil && (shadow.GetPercent() == 0 || shadow.GetPercent() > maxPercent) {
		return fault.InField(fault.InvalidRequest, "route.shadow.percent", "%d, 1 to %d are possible", shadow.GetPercent(), maxPercent)
	}
	for _, field := range slices.Sorted(maps.Keys(ids)) {
		if err := ids[field].Validate(); err != nil {
			return fault.InField(fault.InvalidRequest, field, "%w", err)
		}
	}
	return nil
}

// SetAlias creates an alias or replaces its route. The package comment says how it works.
func (r *Registry) SetAlias(ctx context.Context, in AliasChange) (out *meshv1.Alias, err error) {
	if err := r.changeable(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), changeTimeout)
	defer cancel()
	isWritten := false
	err = retry(ctx, func() error {
		out, err = r.trySet(ctx, in, &isWritten)
		return err
	})
	return out, err
}

// trySet sets an alias once. isWritten is true once a try may have written the route as target.
func (r *Registry) trySet(ctx context.Context, in AliasChange, isWritten *bool) (*meshv1.Alias, error) {
	if err := r.checkModels(ctx, in, false); err != nil {
		return nil, err
	}
	var before, after *meshv1.Alias
	target, err := r.change(ctx, aliasKey(in.Name), false, func(e discovery.Entry) (edit, error) {
		before = &meshv1.Alias{}
		if there, err := decodeAlias(e); err == nil && e.Revision != 0 {
			before = there.Alias
		}
		isOwn := *isWritten && (proto.Equal(before.Target, in.Route) || before.Target == nil && proto.Equal(before.Active, in.Route))
		if err := in.check(before, isOwn); err != nil {
			return edit{}, err
		}
		after = proto.CloneOf(before)
		after.Name, after.Owner, after.Target = string(in.Name), in.Owner, in.Route
		if before.Target == nil && proto.Equal(before.Active, in.Route) {
			after = before
			return edit{}, nil
		}
		*isWritten = true
		return edit{put: after}, nil
	})
	if err != nil {
		return nil, err
	}
	missing := r.checkModels(ctx, in, in.AutoDelete)
	if after == before {
		return before, missing
	}
	if missing == nil && !in.Force && r.hasFewer(in.Route, before.Active) {
		r.deleteUnused(ctx, before.Target)
		return after, nil
	}
	next := edit{put: after}
	switch after.Target = nil; {
	case missing == nil:
		after.Active = in.Route
	case before.Active == nil:
		next = edit{remove: true}
	}
	revision, err := r.write(ctx, discovery.Entry{Key: aliasKey(in.Name), Revision: target}, next)
	switch {
	case missing != nil:
		return nil, missing
	case err != nil:
		return nil, err // after a conflict a newer target wins, or this one is set again
	}
	r.await(ctx, func(c *content) bool { a := c.aliases.get(in.Name); return a == nil || a.revision >= revision })
	r.deleteUnused(ctx, before.Active, before.Target)
	return after, nil
}

// hasFewer reports whether the model of a route has fewer loaded replicas than another route's.
func (r *Registry) hasFewer(route, than *meshv1.AliasRoute) bool {
	_, of, _ := r.Model(model.ID(route.GetModel()))
	_, before, _ := r.Model(model.ID(than.GetModel()))
	return route.GetModel() != than.GetModel() && loadedReplicas(of) < loadedReplicas(before)
}

// Switching returns the aliases whose target waits for models of a stage to be loaded.
func (r *Registry) Switching(stage pipeline.StageName) (out []*meshv1.Alias) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, a := range r.served.aliases.all {
		if m := r.served.models.get(model.ID(a.Target.GetModel())); a.GetActive() != nil && a.Target != nil && m != nil && m.Stage == stage {
			out = append(out, a.Alias)
		}
	}
	return out
}

// Switch makes the target of an alias active, if it still is its target.
func (r *Registry) Switch(ctx context.Context, of *meshv1.Alias) error {
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	isSwitched := false
	_, err := r.change(ctx, aliasKey(model.ID(of.GetName())), false, func(e discovery.Entry) (edit, error) {
		next := proto.CloneOf(of)
		next.Active, next.Target = of.GetTarget(), nil
		there, err := decodeAlias(e)
		switch {
		case err != nil || e.Revision == 0:
			isSwitched = false
		case proto.Equal(there.Alias, of):
			isSwitched = true
			return edit{put: next}, nil
		default:
			isSwitched = proto.Equal(there.Alias, next) // by a try whose answer was lost
		}
		return edit{}, nil
	})
	if err == nil && isSwitched {
		r.deleteUnused(ctx, of.GetActive())
	}
	return err
}

// AwaitSwitch waits until an alias has its target no more, and returns it then.
func (r *Registry) AwaitSwitch(ctx context.Context, name model.ID) (alias *meshv1.Alias, err error) {
	isSwitched := r.until(ctx, func() bool {
		alias, err = r.Alias(name, "")
		return err != nil || alias.GetTarget() == nil
	})
	if !isSwitched {
		return nil, fault.Newf(fault.ModelLoading, "alias %.*q waits for model %.*q to be loaded", fault.MaxQuoted, string(name), fault.MaxQuoted, alias.GetTarget().GetModel()).WithRetryAfter(time.Second)
	}
	return alias, err
}

// Choose returns the model of a route that gets a request, and the one that also runs it for
// comparison, if any: the same for each try of it.
func Choose(route *meshv1.AliasRoute, request pipeline.RequestID) (chosen, shadow model.ID) {
	chosen = model.ID(route.GetModel())
	if len(route.GetWeights()) > 0 {
		percent := percentOf("", request)
		for _, id := range slices.Sorted(maps.Keys(route.GetWeights())) {
			if weight := route.GetWeights()[id]; percent >= weight {
				percent -= weight
			} else {
				chosen = model.ID(id)
				break
			}
		}
	}
	// Another hash: weights and shadow choose independently.
	if s := route.GetShadow(); s != nil && s.GetModel() != string(chosen) && percentOf("shadow", request) < s.GetPercent() {
		shadow = model.ID(s.GetModel())
	}
	return chosen, shadow
}

// percentOf returns a number below 100, by the hash of a request's ID.
func percentOf(purpose string, request pipeline.RequestID) uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(purpose))
	_, _ = h.Write([]byte(request))
	return h.Sum32() % maxPercent
}

// checkModels reads the models of a route, which are all of one stage. One that is being
// unregistered may come back, so that is errRepeat, too. If autoDelete is true, the route's model
// gets AutoDelete.
func (r *Registry) checkModels(ctx context.Context, in AliasChange, autoDelete bool) error {
	stage := pipeline.StageName("")
	var first *Model
	for id := range models(in.Route) {
		e, err := r.get(ctx, modelKey(id))
		if err != nil {
			return discovery.Classify(err)
		}
		m := current(e)
		switch {
		case m == nil && e.Revision != 0:
			return errors.Join(errRepeat, Unknown(id))
		case m == nil:
			return Unknown(id)
		case stage != "" && m.Stage != stage:
			return fault.InField(fault.InvalidRequest, "route", "model %.*q is one of stage %s, and others of the route are of stage %s", fault.MaxQuoted, string(id), m.Stage, stage)
		}
		if stage = m.Stage; string(id) == in.Route.GetModel() {
			first = m
		}
	}
	if !autoDelete || first == nil || first.AutoDelete {
		return nil
	}
	_, err := r.Register(ctx, Registration{Model: first.Model, AutoDelete: true})
	return err
}

// check checks an alias before its change; one without a name does not exist. isOwn is true if an
// earlier try may have given it its route, whose model was then not expected.
func (in AliasChange) check(before *meshv1.Alias, isOwn bool) error {
	now := before.GetTarget().GetModel()
	if now == "" {
		now = before.GetActive().GetModel()
	}
	switch exists := before.GetName() != ""; {
	case !exists && (in.UpdateOnly || in.ExpectModel != "" && string(in.ExpectModel) != in.Route.GetModel()):
		return unknownAlias(in.Name)
	case !exists:
		return nil
	case before.GetOwner() != in.Owner:
		return fault.Newf(fault.AliasConflict, "alias %.*q has another owner", fault.MaxQuoted, string(in.Name))
	case in.ExpectModel != "" && now != string(in.ExpectModel) && !isOwn:
		return fault.Newf(fault.AliasConflict, "alias %.*q points at %.*q, and %.*q was expected", fault.MaxQuoted, string(in.Name), fault.MaxQuoted, now, fault.MaxQuoted, string(in.ExpectModel))
	}
	return nil
}

// DeleteAlias removes an alias, if it exists.
func (r *Registry) DeleteAlias(ctx context.Context, name model.ID, owner string) error {
	if err := r.changeable(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	var before *alias
	var revision discovery.Revision
	_, err := r.change(ctx, aliasKey(name), false, func(e discovery.Entry) (edit, error) {
		there, err := decodeAlias(e)
		if err == nil && e.Revision != 0 && there.GetOwner() != owner {
			return edit{}, unknownAlias(name)
		}
		before, revision = there, e.Revision
		return edit{remove: true}, nil
	})
	if err != nil || revision == 0 {
		return err
	}
	r.await(ctx, func(c *content) bool { a := c.aliases.get(name); return a == nil || a.revision > revision })
	r.deleteUnused(ctx, before.Active, before.Target)
	return nil
}

// deleteUnused unregisters those models of former routes that are to be deleted when no alias
// points at them.
func (r *Registry) deleteUnused(ctx context.Context, routes ...*meshv1.AliasRoute) {
	for _, id := range slices.Compact(slices.Sorted(models(routes...))) {
		m, _, ok := r.Model(id)
		if !ok || !m.AutoDelete {
			continue
		}
		if err := r.Unregister(ctx, id); err != nil && fault.From(err).Reason != fault.ModelInUse {
			r.log.Warn("a model without an alias is not unregistered", "model", id, "error", err)
		}
	}
}
