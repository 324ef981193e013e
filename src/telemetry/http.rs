//! `/metrics`, `/healthz` and `/readyz`, on one TCP address.

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;
use metrics_exporter_prometheus::PrometheusHandle;
use std::net::SocketAddr;
use tokio::sync::watch;

/// The routes. `ready` becomes true when the ledger is recovered, the first scan is done and every resource is
/// registered or waits for an absent kubelet (I11).
pub fn routes(metrics: PrometheusHandle, ready: watch::Receiver<bool>) -> Router {
    Router::new()
        .route(
            "/metrics",
            get(move || async move { ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], metrics.render()) }),
        )
        .route("/healthz", get(|| async { "ok\n" }))
        .route(
            "/readyz",
            get(move || async move {
                if *ready.borrow() { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") }
            }),
        )
}

/// Serves `routes` on `address`. Where that is taken the daemon works on without, and says so.
pub async fn serve(address: SocketAddr, routes: Router) -> Option<tokio::task::JoinHandle<()>> {
    let listener = match tokio::net::TcpListener::bind(address).await {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%address, %error, "/metrics, /healthz and /readyz are not served; set `telemetry.listen` to a free address");
            return None;
        }
    };
    // Port 0 asks for any.
    let address = listener.local_addr().unwrap_or(address);
    tracing::info!(%address, "serving /metrics, /healthz and /readyz");
    Some(tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, routes).await {
            tracing::error!(%error, "telemetry failed");
        }
    }))
}
