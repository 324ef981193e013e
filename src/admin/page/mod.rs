//! The page at `/` of the telemetry address: the daemon's state in a browser.
//!
//! It is made at each request from the same snapshots as `status`, and nothing of it is kept.
//! Without a token every peer that reaches the address may read it. So it shows which pod has which
//! device, and how healthy devices are. It shows nothing that a container was given: no
//! environment, no paths of mounts.

mod html;

use self::html::{Facts, STYLE};
use super::devices::reports;
use super::{Status, Views};
use crate::domain::{DeviceId, PendingReleases, Timestamp};
use crate::host;
use crate::picture::{self, Cpus, Leaf, fold, svg};
use crate::telemetry::http::{Pages, Refused};
use crate::telemetry::{Connection, PageKey};
use axum::Router;
use axum::extract::Extension;
use axum::http::{HeaderMap, Uri, header};
use axum::routing::get;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::time::Instant;

/// Boxes of the picture. More are not readable, and they are most of a page's bytes.
const BOXES_MAX: usize = 128;
/// Seconds after which a page may request to be loaded again.
const REFRESH: std::ops::RangeInclusive<u32> = 1..=3600;

/// The route.
pub(super) fn routes(views: Views, pages: Pages) -> Router {
    let started = Instant::now();
    let page = move |Extension(connection): Extension<Arc<Connection>>,
                     uri: Uri,
                     headers: HeaderMap| async move {
        let refresh = refresh(uri.query().unwrap_or_default());
        let html = pages
            .page(&connection, &headers, PageKey::Overview(refresh), move || {
                page(&views, started, refresh)
            })
            .await?;
        let headers = [
            (header::CONTENT_TYPE, "text/html; charset=utf-8"),
            (header::CONTENT_SECURITY_POLICY, "default-src 'none'; style-src 'unsafe-inline'"),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-store"),
        ];
        Ok::<_, Refused>((headers, html))
    };
    Router::new().route("/", get(page))
}

/// The value of `refresh=5` in a query. Anything else is ignored and is not an error.
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
    html::page(&facts, STYLE)
}

/// The offered devices, each once, with the holders of its shares.
fn leaves(views: &Views) -> Vec<Leaf> {
    // Copies: a publisher must not wait for the page.
    let (grants, inventory) =
        (Arc::clone(&views.grants.borrow()), Arc::clone(&views.inventory.borrow()));
    let holders = picture::holders(grants.iter().map(AsRef::as_ref), &PendingReleases::new());
    let mut leaves: BTreeMap<DeviceId, Leaf> = BTreeMap::new();
    let verdicts = views.judgement.borrow().verdicts.clone();
    for (resource, offering) in &inventory.resources {
        for offered in offering.devices.values() {
            let leaf = leaves
                .entry(offered.device.id.clone())
                .or_insert_with(|| Leaf::of(&offered.device));
            if !leaf.resources.iter().any(|known| known == resource.as_str()) {
                leaf.resources.push(resource.to_string());
            }
            // Another resource that lists the device may give another reason (held, and not
            // selected).
            if leaf.health.is_none() || !offered.health.is_healthy() {
                leaf.health = Some(offered.health.as_str());
                leaf.reason = offered.health.reason().map(|reason| reason.to_string());
                let detail = offered
                    .health
                    .reason()
                    .zip(verdicts.get(&offered.device.id))
                    .map(|(reason, verdict)| verdict.detail(reason));
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

/// When the kubelet created its socket.
fn kubelet_since(status: &Status) -> Option<Timestamp> {
    status.kubelet?.made_at()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refresh_interval_is_bounded() {
        let cases = [
            ("refresh=5", Some(5)),
            ("a=b&refresh=60", Some(60)),
            ("refresh=0", None),
            ("refresh=1;url=//x", None),
            ("", None),
        ];
        for (query, wanted) in cases {
            assert_eq!(refresh(query), wanted, "{query}");
        }
    }
}
