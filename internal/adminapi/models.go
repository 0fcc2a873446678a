package adminapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/admin/v1"
	meshv1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/mesh/v1"

	"github.com/stagemesh/stagemesh/internal/call"
	"github.com/stagemesh/stagemesh/internal/models"
	"github.com/stagemesh/stagemesh/internal/transport"
	"github.com/stagemesh/stagemesh/mesh/fault"
	"github.com/stagemesh/stagemesh/mesh/model"
	"github.com/stagemesh/stagemesh/mesh/payload"
	"github.com/stagemesh/stagemesh/mesh/pipeline"
)

const (
	defaultPage, maxPage = 100, 1000
	// loadedUnused is the age of the last use of a model that is registered and loaded.
	loadedUnused = time.Hour
)

// modelStatus returns a model and its state now.
func modelStatus(m *models.Model, r *meshv1.ReplicasRecord) *adminv1.ModelStatus {
	out := &adminv1.ModelStatus{
		Model: models.ToProto(m.Model), Replicas: models.LiveReplicas(r, time.Now()),
		RegisteredAt: timestamppb.New(m.RegisteredAt), LastUse: r.GetLastUse(), AutoDelete: m.AutoDelete,
	}
	state, _ := models.BestState(out.GetReplicas())
	out.State = map[meshv1.ReplicaState]adminv1.ModelState{
		0: adminv1.ModelState_MODEL_STATE_NOT_LOADED,
		meshv1.ReplicaState_REPLICA_STATE_LOADING: adminv1.ModelState_MODEL_STATE_LOADING,
		meshv1.ReplicaState_REPLICA_STATE_LOADED:  adminv1.ModelState_MODEL_STATE_LOADED,
		meshv1.ReplicaState_REPLICA_STATE_FAILED:  adminv1.ModelState_MODEL_STATE_LOADING_FAILED,
	}[state]
	return out
}

// validID checks the ID of a model or the name of an alias.
func validID(field, id string) (model.ID, error) {
	if err := model.ID(id).Validate(); err != nil {
		return "", transport.InvalidField(field, err)
	}
	return model.ID(id), nil
}

func validStageName(name string) (pipeline.StageName, error) {
	if err := pipeline.ValidName("stage", name); err != nil {
		return "", transport.InvalidField("stage", err)
	}
	return pipeline.StageName(name), nil
}

func (h *handler) registerModel(ctx context.Context, in *adminv1.RegisterModelRequest) (*adminv1.RegisterModelResponse, error) {
	wanted, err := models.FromProto("model.", in.GetModel())
	if err != nil {
		return nil, err
	}
	change := models.Registration{Model: wanted}
	if in.GetLoadNow() {
		change.LastUse = time.Now().Add(-loadedUnused)
	}
	if at := in.GetLastUse(); at != nil {
		if err := at.CheckValid(); err != nil {
			return nil, transport.InvalidField("last_use", err)
		}
		change.LastUse = at.AsTime()
	}
	created, err := h.Models.Register(ctx, change)
	if err != nil {
		return nil, err
	}
	if in.GetLoadNow() {
		if err := h.load(ctx, wanted.ID, in.GetWait(), change.LastUse); err != nil {
			h.Logger.Warn("a registered model is not loaded", "model", wanted.ID, "error", err)
		}
	}
	out, err := h.getModel(ctx, &adminv1.GetModelRequest{Id: string(wanted.ID)})
	return &adminv1.RegisterModelResponse{Model: out.GetModel(), Created: created}, err
}

// untilStop returns a context that also ends when the gateway stops, for a call that waits.
func (h *handler) untilStop(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	release := context.AfterFunc(h.Stopping, cancel)
	return ctx, func() {
		release()
		cancel()
	}
}

// load has a host load a model.
func (h *handler) load(ctx context.Context, id model.ID, wait bool, lastUse time.Time) error {
	ctx, cancel := h.untilStop(ctx)
	defer cancel()
	return h.Placer.EnsureLoaded(ctx, id, models.Wanted{Replicas: 1, LastUse: lastUse}, wait)
}

func (h *handler) unregisterModel(ctx context.Context, in *adminv1.UnregisterModelRequest) (*adminv1.UnregisterModelResponse, error) {
	id, err := validID("id", in.GetId())
	if err == nil {
		err = h.Models.Unregister(ctx, id)
	}
	return &adminv1.UnregisterModelResponse{}, err
}

func (h *handler) ensureLoaded(ctx context.Context, in *adminv1.EnsureLoadedRequest) (*adminv1.EnsureLoadedResponse, error) {
	id, err := validID("id", in.GetId())
	if err == nil {
		err = h.load(ctx, id, in.GetWait(), time.Now())
	}
	if err != nil {
		return nil, err
	}
	out, err := h.getModel(ctx, &adminv1.GetModelRequest{Id: in.GetId()})
	return &adminv1.EnsureLoadedResponse{Model: out.GetModel()}, err
}

func (h *handler) evictModel(ctx context.Context, in *adminv1.EvictModelRequest) (*adminv1.EvictModelResponse, error) {
	id, err := validID("id", in.GetId())
	if err == nil {
		err = h.Models.Evict(ctx, id)
	}
	if err != nil {
		return nil, err
	}
	out, err := h.getModel(ctx, &adminv1.GetModelRequest{Id: in.GetId()})
	return &adminv1.EvictModelResponse{Model: out.GetModel()}, err
}

func (h *handler) getModel(_ context.Context, in *adminv1.GetModelRequest) (*adminv1.GetModelResponse, error) {
	id, err := validID("id", in.GetId())
	if err != nil {
		return nil, err
	}
	m, replicas, err := h.Models.Get(id)
	if err != nil {
		return nil, err
	}
	return &adminv1.GetModelResponse{Model: modelStatus(m, replicas)}, nil
}

func pageSize(asked uint32) (int, error) {
	if asked > maxPage {
		return 0, transport.InvalidField("page_size", fmt.Errorf("%d, at most %d are possible", asked, maxPage))
	}
	return cmp.Or(int(asked), defaultPage), nil
}

func (h *handler) listModels(_ context.Context, in *adminv1.ListModelsRequest) (*adminv1.ListModelsResponse, error) {
	size, err := pageSize(in.GetPageSize())
	if err == nil && in.GetStage() != "" {
		_, err = validStageName(in.GetStage())
	}
	if !in.GetLatest() && in.GetIdPrefix() != "" {
		err = transport.InvalidField("id_prefix", errors.New("it is for the latest models"))
	}
	if err == nil {
		err = h.Models.Ready()
	}
	if err != nil {
		return nil, err
	}
	if in.GetLatest() {
		return h.latestModels(in, size), nil
	}
	page, replicas, next := h.Models.List(pipeline.StageName(in.GetStage()), model.ID(in.GetPageToken()), size)
	out := &adminv1.ListModelsResponse{NextPageToken: string(next)}
	out.StaleSince, out.StaleCause = stale(h.Models.Stale())
	for i, m := range page {
		out.Models = append(out.Models, modelStatus(m, replicas[i]))
	}
	return out, nil
}

// latestModels reads all models in pages, and keeps those used last.
func (h *handler) latestModels(in *adminv1.ListModelsRequest, size int) *adminv1.ListModelsResponse {
	type used struct {
		*models.Model
		replicas *meshv1.ReplicasRecord
	}
	var latest []used
	for next, begun := model.ID(""), false; next != "" || !begun; begun = true {
		var page []*models.Model
		var replicas []*meshv1.ReplicasRecord
		page, replicas, next = h.Models.List(pipeline.StageName(in.GetStage()), next, maxPage)
		for i, m := range page {
			if strings.HasPrefix(string(m.ID), in.GetIdPrefix()) {
				latest = append(latest, used{m, replicas[i]})
			}
		}
		slices.SortStableFunc(latest, func(a, b used) int {
			return b.replicas.GetLastUse().AsTime().Compare(a.replicas.GetLastUse().AsTime())
		})
		latest = latest[:min(size, len(latest))]
	}
	out := &adminv1.ListModelsResponse{}
	out.StaleSince, out.StaleCause = stale(h.Models.Stale())
	for _, one := range latest {
		out.Models = append(out.Models, modelStatus(one.Model, one.replicas))
	}
	return out
}

func (h *handler) setAlias(ctx context.Context, in *adminv1.SetAliasRequest) (*adminv1.SetAliasResponse, error) {
	change := models.AliasChange{
		Name: model.ID(in.GetName()), Route: in.GetRoute(), Owner: in.GetOwner(), ExpectModel: model.ID(in.GetExpectModel()),
		UpdateOnly: in.GetUpdateOnly(), AutoDelete: in.GetAutoDelete(), Force: in.GetForce(),
	}
	if err := change.Validate(); err != nil {
		return nil, err
	}
	if in.GetRegister() != nil {
		wanted, err := models.FromProto("register.", in.GetRegister())
		if err == nil {
			_, err = h.Models.Register(ctx, models.Registration{Model: wanted})
		}
		if err != nil {
			return nil, err
		}
	}
	alias, err := h.Models.SetAlias(ctx, change)
	if err == nil && in.GetWait() {
		waiting, cancel := h.untilStop(ctx)
		defer cancel()
		alias, err = h.Models.AwaitSwitch(waiting, change.Name)
	}
	if err != nil {
		return nil, err
	}
	h.Logger.Info("alias set", "alias", in.GetName(), "model", in.GetRoute().GetModel())
	return &adminv1.SetAliasResponse{Alias: alias}, nil
}

func (h *handler) deleteAlias(ctx context.Context, in *adminv1.DeleteAliasRequest) (*adminv1.DeleteAliasResponse, error) {
	name, err := validID("name", in.GetName())
	if err == nil {
		err = h.Models.DeleteAlias(ctx, name, in.GetOwner())
	}
	if err == nil {
		h.Logger.Info("alias deleted", "alias", name)
	}
	return &adminv1.DeleteAliasResponse{}, err
}

func (h *handler) getAlias(_ context.Context, in *adminv1.GetAliasRequest) (*adminv1.GetAliasResponse, error) {
	name, err := validID("name", in.GetName())
	if err != nil {
		return nil, err
	}
	alias, err := h.Models.Alias(name, in.GetOwner())
	return &adminv1.GetAliasResponse{Alias: alias}, err
}

func (h *handler) listAliases(_ context.Context, in *adminv1.ListAliasesRequest) (*adminv1.ListAliasesResponse, error) {
	size, err := pageSize(in.GetPageSize())
	if err == nil {
		err = h.Models.Ready()
	}
	if err != nil {
		return nil, err
	}
	page, next := h.Models.ListAliases(model.ID(in.GetPageToken()), size)
	out := &adminv1.ListAliasesResponse{Aliases: page, NextPageToken: string(next)}
	out.StaleSince, out.StaleCause = stale(h.Models.Stale())
	return out, nil
}

func (h *handler) getModelSettings(_ context.Context, in *adminv1.GetSettingsRequest) (*adminv1.GetSettingsResponse, error) {
	stage, err := validStageName(in.GetStage())
	if err == nil {
		err = h.Models.Ready()
	}
	return &adminv1.GetSettingsResponse{Settings: h.Models.StageSettings(stage)}, err
}

func (h *handler) setModelSettings(ctx context.Context, in *adminv1.SetSettingsRequest) (*adminv1.SetSettingsResponse, error) {
	stage, err := validStageName(in.GetStage())
	if err == nil {
		err = models.ValidateSettings("settings.", in.GetSettings())
	}
	if err != nil {
		return nil, err
	}
	err = h.Models.SetStageSettings(ctx, stage, in.GetSettings())
	if err == nil {
		h.Logger.Info("settings of models set", "stage", stage)
	}
	return &adminv1.SetSettingsResponse{}, err
}

// tapModel is for operators alone: what it shows belongs to callers.
func (h *handler) tapModel(ctx context.Context, _ *transport.Call, in *adminv1.TapModelRequest, send func(*adminv1.TapModelResponse) error) error {
	err := refuseReader(ctx, "see payloads")
	switch {
	case err != nil:
	case (in.GetModel() == "") == (in.GetAlias() == ""):
		err = transport.InvalidField("model", errors.New("name a model or an alias"))
	case in.GetPercent() > 100:
		err = transport.InvalidField("percent", fmt.Errorf("%d, at most 100 are possible", in.GetPercent()))
	case in.GetAlias() != "":
		_, err = h.Models.Alias(model.ID(in.GetAlias()), "")
	default:
		_, _, err = h.Models.Get(model.ID(in.GetModel()))
	}
	if err != nil {
		return err
	}
	h.Logger.Info("tap begins", "model", in.GetModel(), "alias", in.GetAlias())
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(h.Stopping, cancel)()
	err = h.Traffic.Tap(ctx, payload.ModelRef{Model: in.GetModel(), Alias: in.GetAlias()}, cmp.Or(int(in.GetPercent()), 100), func(one call.Tapped) error {
		out := &adminv1.TapModelResponse{
			RequestId: string(one.Env.RequestID), Pipeline: string(one.Env.Pipeline), Model: one.Model, Shadow: one.IsShadow,
			AdmittedAt: timestamppb.New(one.Env.AdmittedAt), Took: durationpb.New(one.Took), Inputs: payload.ToProto(one.Env.Parts), Dropped: one.Dropped, Tenant: one.Env.Tenant,
		}
		if one.Fault != nil {
			out.Fault = one.Fault.ToProto()
		} else {
			out.Outputs = payload.ToProto(one.Response.Outputs)
		}
		return send(out)
	})
	if h.Stopping.Err() != nil {
		return fault.New(fault.ShuttingDown, "the gateway is stopping; tap another one")
	}
	return err
}
