//! The page at `/` of the telemetry address: the daemon at a glance, for a browser. Made when it is asked for, out of the same
//! snapshots as `status`; nothing of it is kept.
//!
//! Whoever reaches that address may read it, so it says who has which device and how devices are, and nothing of what a
//! container was given: no environment, no paths of mounts.

mod html;

use self::html::{Facts, LOOKS};
use super::devices::reports;
use super::{Status, Views};
use crate::domain::{DeviceId, Timestamp};
use crate::host;
use crate::picture::{self, Cpus, Leaf, fold, svg};
use axum::Router;
use axum::http::{StatusCode, Uri, header};
use axum::routing::get;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Pages that are made at the same time: a page is some milliseconds' work, and nobody may keep the daemon busy with it.
const MAKERS_MAX: usize = 1;
/// Boxes of the picture: more cannot be looked at, and they are most of a page's bytes.
const BOXES_MAX: usize = 128;
/// Seconds after which a page may ask to be loaded anew.
const REFRESH: std::ops::RangeInclusive<u32> = 1..=3600;

/// The route.
pub(super) fn routes(views: Views) -> Router {
    let (started, makers) = (Instant::now(), Arc::new(Semaphore::new(MAKERS_MAX)));
    let page = move |uri: Uri| async move {
        let Ok(_turn) = makers.acquire().await else { return Err(StatusCode::SERVICE_UNAVAILABLE) };
        let refresh = refresh(uri.query().unwrap_or_default());
        // Away from the thread that serves the kubelet.
        let made = tokio::task::spawn_blocking(move || page(&views, started, refresh)).await;
        let headers = [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, "default-src 'none'; style-src 'unsafe-inline'"),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-store"),
        ];
        made.map(|html| (headers, html)).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
    };
    Router::new().route("/", get(page))
}

/// `refresh=5` of a query; nothing else is understood, and nothing else is an error.
fn refresh(query: &str) -> Option<u32> {
    let value = query.split('&').find_map(|pair| pair.strip_prefix("refresh="))?;
    value.parse().ok().filter(|seconds| REFRESH.contains(seconds))
}

fn page(views: &Views, started: Instant, refresh: Option<u32>) -> String {
    let status = Status::of(views, started.elapsed());
    let devices = reports(views);
    let grants = views.grants.borrow().clone();
    let picture = picture::tree(leaves(views), &Cpus::new());
    let facts = Facts {
        status: &status,
        devices: &devices,
        grants: &grants,
        picture: svg::draw(&fold(&picture, false), picture.count(), BOXES_MAX),
        refresh,
        now: host::now().wall,
    };
    html::page(&facts, LOOKS)
}

/// What is offered, each device once, with those who have shares of it.
fn leaves(views: &Views) -> Vec<Leaf> {
    let holders = picture::holders(views.grants.borrow().iter().map(AsRef::as_ref));
    let mut leaves: BTreeMap<DeviceId, Leaf> = BTreeMap::new();
    let verdicts = views.judgement.borrow().verdicts.clone();
    for (resource, offering) in &views.inventory.borrow().resources {
        for offered in offering.devices.values() {
            let leaf = leaves.entry(offered.device.id.clone()).or_insert_with(|| Leaf::of(&offered.device));
            if !leaf.resources.iter().any(|known| known == resource.as_str()) {
                leaf.resources.push(resource.to_string());
            }
            // A resource that has it otherwise (held, and not selected) has another word for it.
            if leaf.health.is_none() || !offered.health.is_healthy() {
                leaf.health = Some(offered.health.as_str());
                leaf.reason = offered.health.reason().map(|reason| reason.to_string());
                let detail = offered.health.reason().zip(verdicts.get(&offered.device.id)).map(|(reason, verdict)| verdict.detail(reason));
                leaf.detail = detail.filter(|detail| !detail.is_empty()).map(str::to_owned);
            }
        }
    }
    for (id, holders) in holders {
        if let Some(leaf) = leaves.get_mut(&id) {
            leaf.holders = holders;
        }
    }
    leaves.into_values().collect()
}

/// When the kubelet made its socket.
fn kubelet_since(status: &Status) -> Option<Timestamp> {
    status.kubelet?.made_at()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_loaded_anew_as_often_as_is_sensible() {
        let cases = [("refresh=5", Some(5)), ("a=b&refresh=60", Some(60)), ("refresh=0", None), ("refresh=1;url=//x", None), ("", None)];
        for (query, wanted) in cases {
            assert_eq!(refresh(query), wanted, "{query}");
        }
    }
}
