"""POST /rerank, /v1/rerank and /score."""

from __future__ import annotations

from fastapi import APIRouter

from modelbay_server.bodies import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["pooling"])
