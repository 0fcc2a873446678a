package models

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/discovery"
	"github.com/stagemesh/stagemesh/internal/bus"
	registry "github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
	"github.com/stagemesh/stagemesh/stagehost/internal/item"
)

const (
	// leadEvery is how often the leader of a stage looks for hosts that died.
	leadEvery = 500 * time.Millisecond
	// forgetAfter is how long a host is dead before its replicas are removed, and its queue.
	// Senders pass it over as soon as they know; its models would be unloaded if it came back.
	forgetAfter = 10 * time.Second
	// listEvery is how often the leader looks at all models.
	listEvery = 5 * time.Second
	// A host that leaves loads the models elsewhere that were used within movedUse, movesAtOnce
	// at a time.
	movedUse    = time.Hour
	movesAtOnce = 8
	// Models are loaded ahead of requests firstPreload after the start, and every preloadEvery.
	firstPreload = 2 * time.Minute
	preloadEvery = 7 * time.Minute
	// switchesAtOnce is how many aliases switch at a time, and switchTimeout bounds a try.
	switchesAtOnce = 8
	switchTimeout  = time.Minute
	switchPause    = 2 * time.Second
	// A host that leaves with models waits for otherTimeout until it knows another one, and looks
	// every otherPoll.
	otherTimeout = time.Second
	otherPoll    = 20 * time.Millisecond
)

// Leader looks after what no host of the stage has: the queues and replicas of those that
// died. The host that joined first leads. There may be two for a moment, which does no harm:
// both pull from a queue, and change records by compare-and-set.
type Leader struct {
	*Models
	// deadSince is when a host was first seen dead.
	deadSince map[pipeline.HostID]time.Time
	// adopted is the queue that this host pulls from in place of its own host, and of is that
	// host; nil where there is none.
	adopted *bus.Puller
	of      pipeline.HostID
	// preloadAt is when models are loaded ahead of requests.
	preloadAt time.Time
	// replicas are the models of each host, as the registry had them at listedAt.
	replicas map[pipeline.HostID][]model.ID
	listedAt time.Time
	// switches run. switching has when an alias may be tried again, by its name and target.
	switches  errgroup.Group
	switching sync.Map
}

// NewLeader returns the leader that the host is from time to time.
func (ms *Models) NewLeader(now time.Time) *Leader {
	l := &Leader{Models: ms, deadSince: map[pipeline.HostID]time.Time{}, preloadAt: now.Add(firstPreload)}
	l.switches.SetLimit(switchesAtOnce)
	return l
}

// Stop ends what a leader has begun.
func (l *Leader) Stop() {
	_ = l.switches.Wait() // no error
	l.release(l.of)
}

// lead looks after the stage while this host is its leader, until the context ends.
func (ms *Models) lead(ctx context.Context) error {
	l := ms.NewLeader(time.Now())
	defer l.Stop()
	tick := time.NewTicker(leadEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := l.Tick(ctx, time.Now()); err != nil && ctx.Err() == nil {
			ms.Logger.Debug("what a dead host has left stays for now", "error", err)
		}
	}
}

// Tick does what is to be done now.
func (l *Leader) Tick(ctx context.Context, now time.Time) error {
	alive, first := l.aliveHosts()
	if since, _ := l.members.Stale(); !since.IsZero() || first != l.Host {
		clear(l.deadSince)
		l.release(l.of)
		return nil
	}
	l.switchAliases(ctx, now)
	l.preload(ctx, now)
	ctx, cancel := context.WithTimeout(ctx, registryTimeout)
	defer cancel()
	if now.Sub(l.listedAt) >= listEvery {
		l.replicas, l.listedAt = map[pipeline.HostID][]model.ID{}, now
		for m, there := range l.registry.Models(l.Stage) {
			for _, one := range there.GetReplicas() {
				host := pipeline.HostID(one.GetHost())
				l.replicas[host] = append(l.replicas[host], m.ID)
			}
		}
	}
	dead, err := l.queues.HostQueues(ctx, l.Stage)
	if err != nil {
		return err
	}
	dead = slices.AppendSeq(dead, maps.Keys(l.replicas))
	slices.Sort(dead)
	dead = slices.DeleteFunc(slices.Compact(dead), func(host pipeline.HostID) bool { return alive[host] })
	maps.DeleteFunc(l.deadSince, func(host pipeline.HostID, _ time.Time) bool { return !slices.Contains(dead, host) })
	if alive[l.of] {
		l.release(l.of)
	}
	for _, host := range dead {
		if _, known := l.deadSince[host]; !known {
			l.deadSince[host] = now
			continue
		}
		if _, isMember := alive[host]; isMember {
			l.deadSince[host] = now // it may pull again, and keeps its replicas and its queue
		}
		isForgotten := now.Sub(l.deadSince[host]) >= forgetAfter
		isAlive, err := l.adopt(ctx, host, isForgotten)
		if err != nil {
			l.Logger.Debug("the queue of a dead host stays for now", "of", host, "error", err)
		}
		if !isForgotten || isAlive || err != nil {
			continue
		}
		for _, id := range l.replicas[host] {
			if err := l.registry.RemoveReplica(ctx, id, host, time.Time{}); err != nil && fault.From(err).Reason != fault.UnknownModel {
				return err
			}
		}
		delete(l.replicas, host)
	}
	return nil
}

// preload begins to load models ahead of requests, if that is due.
func (l *Leader) preload(ctx context.Context, now time.Time) {
	if !now.After(l.preloadAt) {
		return
	}
	begun := l.switches.TryGo(func() error {
		ctx, cancel := context.WithTimeout(ctx, switchTimeout)
		defer cancel()
		if err := l.placer.Preload(ctx, l.Stage); err != nil {
			l.Logger.Debug("models are not loaded ahead of requests", "error", err)
		}
		return nil
	})
	if begun {
		l.preloadAt = now.Add(preloadEvery)
	}
}

// switchAliases begins to switch the aliases that have a target.
func (l *Leader) switchAliases(ctx context.Context, now time.Time) {
	for _, alias := range l.registry.Switching(l.Stage) {
		// A newer target does not wait for the one before.
		name := [2]string{alias.GetName(), alias.GetTarget().GetModel()}
		if after, tried := l.switching.Load(name); tried && now.Before(after.(time.Time)) {
			continue
		}
		l.switching.Store(name, now.Add(2*switchTimeout))
		begun := l.switches.TryGo(func() error {
			if l.switchAlias(ctx, alias) {
				l.switching.Delete(name)
			} else {
				l.switching.Store(name, time.Now().Add(switchPause))
			}
			return nil
		})
		if !begun {
			l.switching.Delete(name)
			return
		}
	}
	l.switching.Range(func(name, after any) bool {
		if now.Sub(after.(time.Time)) > switchTimeout {
			l.switching.Delete(name) // it has no such target any more
		}
		return true
	})
}

// switchAlias has the new model of an alias loaded as often as the old one is, or as often as
// it fits, and then makes it the active one. While it cannot be loaded the old one stays.
func (l *Leader) switchAlias(ctx context.Context, alias *meshv1.Alias) (isSwitched bool) {
	ctx, cancel := context.WithTimeout(ctx, switchTimeout)
	defer cancel()
	_, old, _ := l.registry.Model(model.ID(alias.GetActive().GetModel()))
	wanted := registry.Wanted{Replicas: max(1, l.placer.Replicas(old)), LastUse: time.Now()}
	target := model.ID(alias.GetTarget().GetModel())
	err := l.placer.EnsureLoaded(ctx, target, wanted, true)
	if err == nil {
		err = l.registry.Switch(ctx, alias)
	}
	if err != nil {
		l.Logger.Debug("an alias does not switch yet", "alias", alias.GetName(), "model", target, "error", err)
	}
	return err == nil
}

// aliveHosts returns the hosts of the stage that are alive, each with whether it pulls, and the leader:
// the host that started first of those that pull and do not leave. A host that is not ready does not pull;
// if no host that stays is ready, all count as pulling.
func (ms *Models) aliveHosts() (alive map[pipeline.HostID]bool, leader pipeline.HostID) {
	alive = map[pipeline.HostID]bool{}
	var hosts []*meshv1.HostRecord
	for _, member := range ms.members.Hosts() {
		if r := member.Record; r.GetStage() == string(ms.Stage) && member.Alive {
			hosts = append(hosts, r)
		}
	}
	stays := func(r *meshv1.HostRecord) bool {
		return !r.GetDraining() && (r.GetHost() != string(ms.Host) || !ms.IsLeaving())
	}
	isAnyReady := slices.ContainsFunc(hosts, func(r *meshv1.HostRecord) bool { return r.GetReady() && stays(r) })
	var first *meshv1.HostRecord
	for _, r := range hosts {
		pulls := r.GetReady() || !isAnyReady
		alive[pipeline.HostID(r.GetHost())] = pulls
		if since := r.GetStartedAt().AsTime(); pulls && stays(r) && (first == nil || since.Before(first.GetStartedAt().AsTime())) {
			first = r
		}
	}
	return alive, pipeline.HostID(first.GetHost())
}

// adopt pulls what waits in the queue of a host that died, hangs or cannot run anything, one queue at a
// time, and deletes the queue if it is empty once nobody sends to it any more. What had been delivered
// to the host comes after its ack wait.
func (l *Leader) adopt(ctx context.Context, host pipeline.HostID, isForgotten bool) (isAlive bool, err error) {
	name := pipeline.HostQueue(l.Stage, host)
	queue, err := l.queues.Queue(ctx, name, pipeline.Memory)
	if errors.Is(err, bus.ErrNoQueue) {
		l.release(host)
		return false, nil
	}
	if err != nil {
		return false, err
	}
	// A host that is only unknown to the registry answers; one that hangs does not.
	if answer, err := l.queues.Alive(ctx, name); answer.Answered || err != nil && !errors.Is(err, bus.ErrNoHost) {
		if answer.Answered {
			l.release(host)
		}
		return answer.Answered, err
	}
	switch {
	case queue.Items == 0:
		l.release(host)
		if isForgotten {
			return false, l.queues.DeleteQueue(ctx, name, pipeline.Memory)
		}
		return false, nil
	case l.adopted == nil:
		l.Logger.Info("taking over the requests of a host that is gone", "of", host, "requests", queue.Items)
		if l.adopted, err = l.Pull(name); err != nil {
			return false, err
		}
		l.of = host
	}
	if l.of == host {
		l.adopted.Use(pipeline.Memory, queue.Epoch)
	}
	return false, nil
}

// release ends the pull from the queue of a host, if that is adopted. Requests that are on their
// way return to it.
func (l *Leader) release(of pipeline.HostID) {
	if l.adopted == nil || l.of != of {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.ctx), item.PullDrainTimeout)
	defer cancel()
	_ = l.adopted.Drain(ctx) // what is left is delivered again
	l.adopted.Close()
	l.adopted, l.of = nil, ""
}

// Move has other hosts load the models that were used lately, so that as many have each as
// before: first those that no other host has, then the latest use first. This one serves them
// meanwhile, and is passed over by senders as soon as another has a model. Its queued loads are
// given up. leave shows the host as leaving, once it is known what to move.
func (ms *Models) Move(ctx context.Context, leave func()) {
	type move struct {
		id     model.ID
		wanted registry.Wanted
	}
	var moves []move
	for id, lastUse := range ms.listModels(ctx) {
		if time.Since(lastUse) < movedUse {
			// This host counts until it leaves, and others that leave do not: they move their own.
			_, there, _ := ms.registry.Model(id)
			moves = append(moves, move{id, registry.Wanted{Replicas: max(1, ms.placer.Replicas(there)), Without: []pipeline.HostID{ms.Host}, LastUse: lastUse}})
		}
	}
	leave()
	ms.post(func(s *set) { s.cache.GiveUpQueued() })
	if len(moves) > 0 {
		ms.awaitOther(ctx)
	}
	slices.SortFunc(moves, func(a, b move) int {
		return cmp.Or(cmp.Compare(min(a.wanted.Replicas, 2), min(b.wanted.Replicas, 2)), b.wanted.LastUse.Compare(a.wanted.LastUse))
	})
	var moving errgroup.Group
	moving.SetLimit(movesAtOnce)
	for _, m := range moves {
		moving.Go(func() error {
			if err := ms.placer.EnsureLoaded(ctx, m.id, m.wanted, true); err != nil {
				ms.Logger.Debug("no other host loads the model", "model", m.id, "error", err)
			}
			return nil
		})
	}
	_ = moving.Wait() // no error
}

// awaitOther returns once this host knows another one that loads models, or after otherTimeout: one
// that has just joined may not be in this host's view of the registry yet.
func (ms *Models) awaitOther(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, otherTimeout)
	defer cancel()
	tick := time.NewTicker(otherPoll)
	defer tick.Stop()
	for !slices.ContainsFunc(ms.members.Hosts(), func(h discovery.Host) bool {
		r := h.Record
		return h.Alive && r.GetStage() == string(ms.Stage) && r.GetHost() != string(ms.Host) && !r.GetDraining() && r.GetCache() != nil
	}) {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// DeleteOwnQueue deletes the host's own queue if it is empty and no other host takes over what a
// sender may still put there.
func (ms *Models) DeleteOwnQueue() {
	if _, leader := ms.aliveHosts(); leader != "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), registryTimeout)
	defer cancel()
	name := pipeline.HostQueue(ms.Stage, ms.Host)
	queue, err := ms.queues.Queue(ctx, name, pipeline.Memory)
	if err == nil && queue.Items > 0 {
		return // the next host of the stage takes it over
	}
	if err == nil {
		err = ms.queues.DeleteQueue(ctx, name, pipeline.Memory)
	}
	if err != nil {
		ms.Logger.Warn("the host's own queue stays behind", "error", err)
	}
}
