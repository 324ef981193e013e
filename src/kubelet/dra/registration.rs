//! The service `Registration` of the plugin API: the kubelet asks who serves this socket, and
//! reports whether it has registered the driver.

use super::answers::error_text;
use crate::domain::DRA_DRIVER;
use crate::kubelet::proto::pluginregistration as api;
use crate::kubelet::proto::pluginregistration::registration_server::{
    Registration, RegistrationServer,
};
use crate::kubelet::services::Services;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

/// The gRPC services of the driver by the kubelet's names. The kubelet uses the first one that it
/// knows, so the newest is first.
pub const SERVICES: [&str; 4] =
    ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];

/// The type of a DRA driver among the kubelet's plugins.
const TYPE: &str = "DRAPlugin";

/// Bytes of a request: its only text is the kubelet's error.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// The newest report of a kubelet about the registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The number of reports so far. A kubelet reports after each of its starts, and after each
    /// failed try.
    pub number: u64,
    /// Whether the driver is registered; else the kubelet's error.
    pub result: Result<(), String>,
}

#[derive(Debug)]
struct Service {
    endpoint: String,
    notices: watch::Sender<Option<Notice>>,
}

/// Adds the service. `endpoint` is the path of the socket that serves the driver.
pub(super) fn serve(
    endpoint: String,
    notices: watch::Sender<Option<Notice>>,
    services: Services,
) -> Services {
    let server = RegistrationServer::new(Service { endpoint, notices });
    services.and(server.max_decoding_message_size(REQUEST_BYTES_MAX))
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(
        &self,
        _: Request<api::InfoRequest>,
    ) -> Result<Response<api::PluginInfo>, Status> {
        Ok(Response::new(api::PluginInfo {
            r#type: TYPE.to_owned(),
            name: DRA_DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: SERVICES.map(str::to_owned).to_vec(),
        }))
    }

    /// Always a success: the kubelet would undo the registration after an error.
    async fn notify_registration_status(
        &self,
        request: Request<api::RegistrationStatus>,
    ) -> Result<Response<api::RegistrationStatusResponse>, Status> {
        let api::RegistrationStatus { plugin_registered, error } = request.into_inner();
        let result = if plugin_registered { Ok(()) } else { Err(error_text(&error)) };
        match &result {
            Ok(()) => tracing::info!(driver = DRA_DRIVER, "the kubelet registered the DRA driver"),
            Err(error) => {
                tracing::warn!(driver = DRA_DRIVER, %error, "the kubelet refused the DRA driver");
            }
        }
        self.notices.send_modify(|notice| {
            let number = notice.as_ref().map_or(0, |notice| notice.number) + 1;
            *notice = Some(Notice { number, result });
        });
        Ok(Response::new(api::RegistrationStatusResponse {}))
    }
}
