module {
  func.func @main(%arg0: tensor<32x16xf32>, %arg1: tensor<32x16xf32>, %arg2: tensor<16x16xf32>, %arg3: tensor<16x16xf32>, %arg4: tensor<16x16xf32>, %arg5: tensor<16x16xf32>, %arg6: tensor<64x16xf32>, %arg7: tensor<16x64xf32>, %arg8: tensor<2x8xi64>, %arg9: tensor<2x8xi64>) -> tensor<f32> {
    %c = stablehlo.constant dense<0> : tensor<16xi64>
    %c_0 = stablehlo.constant dense<-100> : tensor<16xi64>
    %c_1 = stablehlo.constant dense<0> : tensor<8x8xi64>
    %c_2 = stablehlo.constant dense<0> : tensor<8xi64>
    %c_3 = stablehlo.constant dense<1> : tensor<8xi64>
    %c_4 = stablehlo.constant dense<8> : tensor<i64>
    %c_5 = stablehlo.constant dense<1> : tensor<i64>
    %c_6 = stablehlo.constant dense<0> : tensor<i64>
    %cst = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %cst_7 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_8 = stablehlo.constant dense<1.000000e+00> : tensor<8x8xf32>
    %cst_9 = stablehlo.constant dense_resource<torch_tensor_8_4_torch.float32_1> : tensor<8x4xf32>
    %cst_10 = stablehlo.constant dense_resource<torch_tensor_8_4_torch.float32> : tensor<8x4xf32>
    %cst_11 = stablehlo.constant dense<0.000000e+00> : tensor<f64>
    %cst_12 = stablehlo.constant dense<0.000000e+00> : tensor<2x8x64xf32>
    %cst_13 = arith.constant dense<2> : tensor<1xi64>
    %cst_14 = arith.constant dense<16> : tensor<1xi64>
    %cst_15 = arith.constant dense<9.9999999999999995E-7> : tensor<1xf64>
    %cst_16 = arith.constant dense<8> : tensor<1xi64>
    %cst_17 = arith.constant dense<2.8284271247461903> : tensor<1xf64>
    %cst_18 = arith.constant dense<15> : tensor<1xi64>
    %0 = "stablehlo.gather"(%arg0, %arg8) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, indices_are_sorted = false, slice_sizes = array<i64: 1, 16>}> : (tensor<32x16xf32>, tensor<2x8xi64>) -> tensor<2x8x16xf32>
    %1 = stablehlo.convert %0 : tensor<2x8x16xf32>
    %2 = stablehlo.convert %1 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %3 = stablehlo.convert %cst_13 : (tensor<1xi64>) -> tensor<1xf64>
    %4 = stablehlo.reshape %3 : (tensor<1xf64>) -> tensor<f64>
    %5 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f64>) -> tensor<2x8x16xf64>
    %6 = stablehlo.power %2, %5 : tensor<2x8x16xf64>
    %7 = stablehlo.reduce(%6 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %8 = stablehlo.reshape %7 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %9 = stablehlo.convert %cst_14 : (tensor<1xi64>) -> tensor<1xf64>
    %10 = stablehlo.reshape %9 : (tensor<1xf64>) -> tensor<f64>
    %11 = stablehlo.broadcast_in_dim %10, dims = [] : (tensor<f64>) -> tensor<2x8x1xf64>
    %12 = stablehlo.divide %8, %11 : tensor<2x8x1xf64>
    %13 = stablehlo.convert %cst_15 : tensor<1xf64>
    %14 = stablehlo.reshape %13 : (tensor<1xf64>) -> tensor<f64>
    %15 = stablehlo.broadcast_in_dim %14, dims = [] : (tensor<f64>) -> tensor<2x8x1xf64>
    %16 = stablehlo.add %12, %15 : tensor<2x8x1xf64>
    %17 = stablehlo.rsqrt %16 : tensor<2x8x1xf64>
    %18 = stablehlo.broadcast_in_dim %17, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %19 = stablehlo.multiply %2, %18 : tensor<2x8x16xf64>
    %20 = stablehlo.convert %19 : (tensor<2x8x16xf64>) -> tensor<2x8x16xf32>
    %21 = stablehlo.convert %20 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %22 = stablehlo.power %21, %5 : tensor<2x8x16xf64>
    %23 = stablehlo.reduce(%22 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %24 = stablehlo.reshape %23 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %25 = stablehlo.divide %24, %11 : tensor<2x8x1xf64>
    %26 = stablehlo.add %25, %15 : tensor<2x8x1xf64>
    %27 = stablehlo.rsqrt %26 : tensor<2x8x1xf64>
    %28 = stablehlo.broadcast_in_dim %27, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %29 = stablehlo.multiply %21, %28 : tensor<2x8x16xf64>
    %30 = stablehlo.convert %29 : (tensor<2x8x16xf64>) -> tensor<2x8x16xf32>
    %31 = stablehlo.transpose %arg2, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %32 = stablehlo.reshape %30 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %33 = stablehlo.dot_general %32, %31, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %34 = stablehlo.reshape %33 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %35 = stablehlo.reshape %34 : (tensor<2x8x16xf32>) -> tensor<2x8x2x8xf32>
    %36 = stablehlo.transpose %arg3, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %37 = stablehlo.dot_general %32, %36, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %38 = stablehlo.reshape %37 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %39 = stablehlo.reshape %38 : (tensor<2x8x16xf32>) -> tensor<2x8x2x8xf32>
    %40 = stablehlo.transpose %arg4, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %41 = stablehlo.dot_general %32, %40, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %42 = stablehlo.reshape %41 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %43 = stablehlo.reshape %42 : (tensor<2x8x16xf32>) -> tensor<2x8x2x8xf32>
    %44 = stablehlo.slice %35 [0:2, 0:8, 0:2, 0:4] : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x4xf32>
    %45 = stablehlo.slice %35 [0:2, 0:8, 0:2, 4:8] : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x4xf32>
    %46 = stablehlo.reshape %cst_10 : (tensor<8x4xf32>) -> tensor<1x8x4xf32>
    %47 = stablehlo.reshape %46 : (tensor<1x8x4xf32>) -> tensor<1x8x1x4xf32>
    %48 = stablehlo.reshape %cst_9 : (tensor<8x4xf32>) -> tensor<1x8x4xf32>
    %49 = stablehlo.reshape %48 : (tensor<1x8x4xf32>) -> tensor<1x8x1x4xf32>
    %50 = stablehlo.broadcast_in_dim %47, dims = [0, 1, 2, 3] : (tensor<1x8x1x4xf32>) -> tensor<2x8x2x4xf32>
    %51 = stablehlo.multiply %44, %50 : tensor<2x8x2x4xf32>
    %52 = stablehlo.broadcast_in_dim %49, dims = [0, 1, 2, 3] : (tensor<1x8x1x4xf32>) -> tensor<2x8x2x4xf32>
    %53 = stablehlo.multiply %45, %52 : tensor<2x8x2x4xf32>
    %54 = stablehlo.subtract %51, %53 : tensor<2x8x2x4xf32>
    %55 = stablehlo.multiply %45, %50 : tensor<2x8x2x4xf32>
    %56 = stablehlo.multiply %44, %52 : tensor<2x8x2x4xf32>
    %57 = stablehlo.add %55, %56 : tensor<2x8x2x4xf32>
    %58 = stablehlo.concatenate %54, %57, dim = 3 : (tensor<2x8x2x4xf32>, tensor<2x8x2x4xf32>) -> tensor<2x8x2x8xf32>
    %59 = stablehlo.slice %39 [0:2, 0:8, 0:2, 0:4] : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x4xf32>
    %60 = stablehlo.slice %39 [0:2, 0:8, 0:2, 4:8] : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x4xf32>
    %61 = stablehlo.multiply %59, %50 : tensor<2x8x2x4xf32>
    %62 = stablehlo.multiply %60, %52 : tensor<2x8x2x4xf32>
    %63 = stablehlo.subtract %61, %62 : tensor<2x8x2x4xf32>
    %64 = stablehlo.multiply %60, %50 : tensor<2x8x2x4xf32>
    %65 = stablehlo.multiply %59, %52 : tensor<2x8x2x4xf32>
    %66 = stablehlo.add %64, %65 : tensor<2x8x2x4xf32>
    %67 = stablehlo.concatenate %63, %66, dim = 3 : (tensor<2x8x2x4xf32>, tensor<2x8x2x4xf32>) -> tensor<2x8x2x8xf32>
    %68 = stablehlo.convert %58 : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x8xf64>
    %69 = stablehlo.broadcast_in_dim %4, dims = [] : (tensor<f64>) -> tensor<2x8x2x8xf64>
    %70 = stablehlo.power %68, %69 : tensor<2x8x2x8xf64>
    %71 = stablehlo.reduce(%70 init: %cst_11) applies stablehlo.add across dimensions = [3] : (tensor<2x8x2x8xf64>, tensor<f64>) -> tensor<2x8x2xf64>
    %72 = stablehlo.reshape %71 : (tensor<2x8x2xf64>) -> tensor<2x8x2x1xf64>
    %73 = stablehlo.convert %cst_16 : (tensor<1xi64>) -> tensor<1xf64>
    %74 = stablehlo.reshape %73 : (tensor<1xf64>) -> tensor<f64>
    %75 = stablehlo.broadcast_in_dim %74, dims = [] : (tensor<f64>) -> tensor<2x8x2x1xf64>
    %76 = stablehlo.divide %72, %75 : tensor<2x8x2x1xf64>
    %77 = stablehlo.broadcast_in_dim %14, dims = [] : (tensor<f64>) -> tensor<2x8x2x1xf64>
    %78 = stablehlo.add %76, %77 : tensor<2x8x2x1xf64>
    %79 = stablehlo.rsqrt %78 : tensor<2x8x2x1xf64>
    %80 = stablehlo.broadcast_in_dim %79, dims = [0, 1, 2, 3] : (tensor<2x8x2x1xf64>) -> tensor<2x8x2x8xf64>
    %81 = stablehlo.multiply %68, %80 : tensor<2x8x2x8xf64>
    %82 = stablehlo.convert %81 : (tensor<2x8x2x8xf64>) -> tensor<2x8x2x8xf32>
    %83 = stablehlo.convert %67 : (tensor<2x8x2x8xf32>) -> tensor<2x8x2x8xf64>
    %84 = stablehlo.power %83, %69 : tensor<2x8x2x8xf64>
    %85 = stablehlo.reduce(%84 init: %cst_11) applies stablehlo.add across dimensions = [3] : (tensor<2x8x2x8xf64>, tensor<f64>) -> tensor<2x8x2xf64>
    %86 = stablehlo.reshape %85 : (tensor<2x8x2xf64>) -> tensor<2x8x2x1xf64>
    %87 = stablehlo.divide %86, %75 : tensor<2x8x2x1xf64>
    %88 = stablehlo.add %87, %77 : tensor<2x8x2x1xf64>
    %89 = stablehlo.rsqrt %88 : tensor<2x8x2x1xf64>
    %90 = stablehlo.broadcast_in_dim %89, dims = [0, 1, 2, 3] : (tensor<2x8x2x1xf64>) -> tensor<2x8x2x8xf64>
    %91 = stablehlo.multiply %83, %90 : tensor<2x8x2x8xf64>
    %92 = stablehlo.convert %91 : (tensor<2x8x2x8xf64>) -> tensor<2x8x2x8xf32>
    %93 = stablehlo.transpose %82, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xf32>) -> tensor<2x2x8x8xf32>
    %94 = stablehlo.transpose %92, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xf32>) -> tensor<2x2x8x8xf32>
    %95 = stablehlo.transpose %43, dims = [0, 2, 1, 3] : (tensor<2x8x2x8xf32>) -> tensor<2x2x8x8xf32>
    %96 = stablehlo.transpose %94, dims = [0, 1, 3, 2] : (tensor<2x2x8x8xf32>) -> tensor<2x2x8x8xf32>
    %97 = stablehlo.reshape %93 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %98 = stablehlo.reshape %96 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %99 = stablehlo.broadcast_in_dim %98, dims = [0, 1, 2] : (tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %100 = stablehlo.dot_general %97, %99, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xf32>, tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %101 = stablehlo.reshape %100 : (tensor<4x8x8xf32>) -> tensor<2x2x8x8xf32>
    %102 = stablehlo.convert %cst_17 : (tensor<1xf64>) -> tensor<1xf32>
    %103 = stablehlo.reshape %102 : (tensor<1xf32>) -> tensor<f32>
    %104 = stablehlo.broadcast_in_dim %103, dims = [] : (tensor<f32>) -> tensor<2x2x8x8xf32>
    %105 = stablehlo.divide %101, %104 : tensor<2x2x8x8xf32>
    %106 = stablehlo.convert %c_5 : (tensor<i64>) -> tensor<f64>
    %107 = stablehlo.convert %c_4 : (tensor<i64>) -> tensor<f64>
    %108 = stablehlo.divide %107, %106 : tensor<f64>
    %109 = stablehlo.ceil %108 : tensor<f64>
    %110 = stablehlo.convert %109 : (tensor<f64>) -> tensor<i64>
    %111 = stablehlo.reshape %110 : (tensor<i64>) -> tensor<1xi64>
    %112 = stablehlo.dynamic_iota %111, dim = 0 : (tensor<1xi64>) -> tensor<8xi64>
    %113 = stablehlo.multiply %112, %c_3 : tensor<8xi64>
    %114 = stablehlo.add %113, %c_2 : tensor<8xi64>
    %115 = stablehlo.reshape %114 : (tensor<8xi64>) -> tensor<1x8xi64>
    %116 = stablehlo.reshape %114 : (tensor<8xi64>) -> tensor<8x1xi64>
    %117 = stablehlo.broadcast_in_dim %115, dims = [0, 1] : (tensor<1x8xi64>) -> tensor<8x8xi64>
    %118 = stablehlo.broadcast_in_dim %116, dims = [0, 1] : (tensor<8x1xi64>) -> tensor<8x8xi64>
    %119 = stablehlo.subtract %117, %118 : tensor<8x8xi64>
    %120 = stablehlo.compare LE, %119, %c_1, SIGNED : (tensor<8x8xi64>, tensor<8x8xi64>) -> tensor<8x8xi1>
    %121 = stablehlo.broadcast_in_dim %120, dims = [0, 1] : (tensor<8x8xi1>) -> tensor<8x8xi1>
    %122 = stablehlo.broadcast_in_dim %cst_8, dims = [0, 1] : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %123 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %124 = stablehlo.select %121, %122, %123 : tensor<8x8xi1>, tensor<8x8xf32>
    %125 = stablehlo.convert %c_6 : (tensor<i64>) -> tensor<f32>
    %126 = stablehlo.broadcast_in_dim %125, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
    %127 = stablehlo.compare EQ, %124, %126, FLOAT : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xi1>
    %128 = stablehlo.reshape %127 : (tensor<8x8xi1>) -> tensor<1x1x8x8xi1>
    %129 = stablehlo.broadcast_in_dim %128, dims = [0, 1, 2, 3] : (tensor<1x1x8x8xi1>) -> tensor<2x2x8x8xi1>
    %130 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x2x8x8xf32>
    %131 = stablehlo.broadcast_in_dim %105, dims = [0, 1, 2, 3] : (tensor<2x2x8x8xf32>) -> tensor<2x2x8x8xf32>
    %132 = stablehlo.select %129, %130, %131 : tensor<2x2x8x8xi1>, tensor<2x2x8x8xf32>
    %133 = stablehlo.reduce(%132 init: %cst) applies stablehlo.maximum across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %134 = stablehlo.reshape %133 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %135 = stablehlo.broadcast_in_dim %134, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %136 = stablehlo.subtract %132, %135 : tensor<2x2x8x8xf32>
    %137 = stablehlo.exponential %136 : tensor<2x2x8x8xf32>
    %138 = stablehlo.reduce(%137 init: %cst_7) applies stablehlo.add across dimensions = [3] : (tensor<2x2x8x8xf32>, tensor<f32>) -> tensor<2x2x8xf32>
    %139 = stablehlo.reshape %138 : (tensor<2x2x8xf32>) -> tensor<2x2x8x1xf32>
    %140 = stablehlo.broadcast_in_dim %139, dims = [0, 1, 2, 3] : (tensor<2x2x8x1xf32>) -> tensor<2x2x8x8xf32>
    %141 = stablehlo.divide %137, %140 : tensor<2x2x8x8xf32>
    %142 = stablehlo.reshape %141 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %143 = stablehlo.reshape %95 : (tensor<2x2x8x8xf32>) -> tensor<4x8x8xf32>
    %144 = stablehlo.broadcast_in_dim %143, dims = [0, 1, 2] : (tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %145 = stablehlo.dot_general %142, %144, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<4x8x8xf32>, tensor<4x8x8xf32>) -> tensor<4x8x8xf32>
    %146 = stablehlo.reshape %145 : (tensor<4x8x8xf32>) -> tensor<2x2x8x8xf32>
    %147 = stablehlo.transpose %146, dims = [0, 2, 1, 3] : (tensor<2x2x8x8xf32>) -> tensor<2x8x2x8xf32>
    %148 = stablehlo.reshape %147 : (tensor<2x8x2x8xf32>) -> tensor<2x8x16xf32>
    %149 = stablehlo.transpose %arg5, dims = [1, 0] : (tensor<16x16xf32>) -> tensor<16x16xf32>
    %150 = stablehlo.reshape %148 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %151 = stablehlo.dot_general %150, %149, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    %152 = stablehlo.reshape %151 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %153 = stablehlo.add %20, %152 : tensor<2x8x16xf32>
    %154 = stablehlo.convert %153 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %155 = stablehlo.power %154, %5 : tensor<2x8x16xf64>
    %156 = stablehlo.reduce(%155 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %157 = stablehlo.reshape %156 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %158 = stablehlo.divide %157, %11 : tensor<2x8x1xf64>
    %159 = stablehlo.add %158, %15 : tensor<2x8x1xf64>
    %160 = stablehlo.rsqrt %159 : tensor<2x8x1xf64>
    %161 = stablehlo.broadcast_in_dim %160, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %162 = stablehlo.multiply %154, %161 : tensor<2x8x16xf64>
    %163 = stablehlo.convert %162 : (tensor<2x8x16xf64>) -> tensor<2x8x16xf32>
    %164 = stablehlo.transpose %arg6, dims = [1, 0] : (tensor<64x16xf32>) -> tensor<16x64xf32>
    %165 = stablehlo.reshape %163 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %166 = stablehlo.dot_general %165, %164, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x64xf32>) -> tensor<16x64xf32>
    %167 = stablehlo.reshape %166 : (tensor<16x64xf32>) -> tensor<2x8x64xf32>
    %168 = stablehlo.maximum %167, %cst_12 : tensor<2x8x64xf32>
    %169 = stablehlo.convert %cst_13 : (tensor<1xi64>) -> tensor<1xf32>
    %170 = stablehlo.reshape %169 : (tensor<1xf32>) -> tensor<f32>
    %171 = stablehlo.broadcast_in_dim %170, dims = [] : (tensor<f32>) -> tensor<2x8x64xf32>
    %172 = stablehlo.power %168, %171 : tensor<2x8x64xf32>
    %173 = stablehlo.transpose %arg7, dims = [1, 0] : (tensor<16x64xf32>) -> tensor<64x16xf32>
    %174 = stablehlo.reshape %172 : (tensor<2x8x64xf32>) -> tensor<16x64xf32>
    %175 = stablehlo.dot_general %174, %173, contracting_dims = [1] x [0] : (tensor<16x64xf32>, tensor<64x16xf32>) -> tensor<16x16xf32>
    %176 = stablehlo.reshape %175 : (tensor<16x16xf32>) -> tensor<2x8x16xf32>
    %177 = stablehlo.add %153, %176 : tensor<2x8x16xf32>
    %178 = stablehlo.convert %177 : (tensor<2x8x16xf32>) -> tensor<2x8x16xf64>
    %179 = stablehlo.power %178, %5 : tensor<2x8x16xf64>
    %180 = stablehlo.reduce(%179 init: %cst_11) applies stablehlo.add across dimensions = [2] : (tensor<2x8x16xf64>, tensor<f64>) -> tensor<2x8xf64>
    %181 = stablehlo.reshape %180 : (tensor<2x8xf64>) -> tensor<2x8x1xf64>
    %182 = stablehlo.divide %181, %11 : tensor<2x8x1xf64>
    %183 = stablehlo.add %182, %15 : tensor<2x8x1xf64>
    %184 = stablehlo.rsqrt %183 : tensor<2x8x1xf64>
    %185 = stablehlo.broadcast_in_dim %184, dims = [0, 1, 2] : (tensor<2x8x1xf64>) -> tensor<2x8x16xf64>
    %186 = stablehlo.multiply %178, %185 : tensor<2x8x16xf64>
    %187 = stablehlo.convert %186 : (tensor<2x8x16xf64>) -> tensor<2x8x16xf32>
    %188 = stablehlo.transpose %arg1, dims = [1, 0] : (tensor<32x16xf32>) -> tensor<16x32xf32>
    %189 = stablehlo.reshape %187 : (tensor<2x8x16xf32>) -> tensor<16x16xf32>
    %190 = stablehlo.dot_general %189, %188, contracting_dims = [1] x [0] : (tensor<16x16xf32>, tensor<16x32xf32>) -> tensor<16x32xf32>
    %191 = stablehlo.reshape %190 : (tensor<16x32xf32>) -> tensor<2x8x32xf32>
    %192 = stablehlo.convert %cst_18 : (tensor<1xi64>) -> tensor<1xf32>
    %193 = stablehlo.reshape %192 : (tensor<1xf32>) -> tensor<f32>
    %194 = stablehlo.broadcast_in_dim %193, dims = [] : (tensor<f32>) -> tensor<2x8x32xf32>
    %195 = stablehlo.divide %191, %194 : tensor<2x8x32xf32>
    %196 = stablehlo.tanh %195 : tensor<2x8x32xf32>
    %197 = stablehlo.multiply %196, %194 : tensor<2x8x32xf32>
    %198 = stablehlo.reshape %197 : (tensor<2x8x32xf32>) -> tensor<16x32xf32>
    %199 = stablehlo.reshape %arg9 : (tensor<2x8xi64>) -> tensor<16xi64>
    %200 = stablehlo.reduce(%198 init: %cst) applies stablehlo.maximum across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %201 = stablehlo.reshape %200 : (tensor<16xf32>) -> tensor<16x1xf32>
    %202 = stablehlo.broadcast_in_dim %201, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %203 = stablehlo.subtract %198, %202 : tensor<16x32xf32>
    %204 = stablehlo.exponential %203 : tensor<16x32xf32>
    %205 = stablehlo.reduce(%204 init: %cst_7) applies stablehlo.add across dimensions = [1] : (tensor<16x32xf32>, tensor<f32>) -> tensor<16xf32>
    %206 = stablehlo.reshape %205 : (tensor<16xf32>) -> tensor<16x1xf32>
    %207 = stablehlo.log %206 : tensor<16x1xf32>
    %208 = stablehlo.broadcast_in_dim %207, dims = [0, 1] : (tensor<16x1xf32>) -> tensor<16x32xf32>
    %209 = stablehlo.subtract %203, %208 : tensor<16x32xf32>
    %210 = stablehlo.compare NE, %199, %c_0, SIGNED : (tensor<16xi64>, tensor<16xi64>) -> tensor<16xi1>
    %211 = stablehlo.broadcast_in_dim %210, dims = [0] : (tensor<16xi1>) -> tensor<16xi1>
    %212 = stablehlo.broadcast_in_dim %199, dims = [0] : (tensor<16xi64>) -> tensor<16xi64>
    %213 = stablehlo.select %211, %212, %c : tensor<16xi1>, tensor<16xi64>
    %214 = stablehlo.reshape %213 : (tensor<16xi64>) -> tensor<16x1xi64>
    %215 = stablehlo.iota dim = 0 : tensor<16x1x1xi64>
    %216 = stablehlo.reshape %214 : (tensor<16x1xi64>) -> tensor<16x1x1xi64>
    %217 = stablehlo.concatenate %215, %216, dim = 2 : (tensor<16x1x1xi64>, tensor<16x1x1xi64>) -> tensor<16x1x2xi64>
    %218 = "stablehlo.gather"(%209, %217) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0, 1], index_vector_dim = 2>, slice_sizes = array<i64: 1, 1>}> : (tensor<16x32xf32>, tensor<16x1x2xi64>) -> tensor<16x1xf32>
    %219 = stablehlo.reshape %218 : (tensor<16x1xf32>) -> tensor<16xf32>
    %220 = stablehlo.negate %219 : tensor<16xf32>
    %221 = stablehlo.broadcast_in_dim %220, dims = [0] : (tensor<16xf32>) -> tensor<16xf32>
    %222 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<16xf32>
    %223 = stablehlo.select %211, %221, %222 : tensor<16xi1>, tensor<16xf32>
    %224 = stablehlo.convert %210 : (tensor<16xi1>) -> tensor<16xi64>
    %225 = stablehlo.reduce(%224 init: %c_6) applies stablehlo.add across dimensions = [0] : (tensor<16xi64>, tensor<i64>) -> tensor<i64>
    %226 = stablehlo.convert %225 : (tensor<i64>) -> tensor<f32>
    %227 = stablehlo.reduce(%223 init: %cst_7) applies stablehlo.add across dimensions = [0] : (tensor<16xf32>, tensor<f32>) -> tensor<f32>
    %228 = stablehlo.divide %227, %226 : tensor<f32>
    return %228 : tensor<f32>
  }
}

{-#
  dialect_resources: {
    builtin: {
      torch_tensor_8_4_torch.float32_1: "0x0400000000000000000000000000000000000000A46A573F7775CC3D57D6233C6E12833AB7C7683FF96F4B3E3ED4A33C6912033BC381103E6D4E973E1FB9F53C939B443BCFBD41BFD861C73EDBCB233D5812833B107C75BF4477F53EF4B64C3DDED6A33B8C0F8FBE698C103FD19C753D599BC43B4630283F73EB243F323E8F3DC75FE53B",
      torch_tensor_8_4_torch.float32: "0x040000000000803F0000803F0000803F0000803F41510A3F98B87E3FB9FC7F3FF8FF7F3F3311D5BEA5E57A3FE5F27F3FDFFF7F3F26707DBFEF90743F83E27F3FB5FF7F3F305527BFA7CA6B3F94CB7F3F7AFF7F3F2C3C913E40A9603F19AE7F3F2EFF7F3FB8CD753F3249533F128A7F3FD2FE7F3FBDFF403FB3CC433F815F7F3F65FE7F3F"
    }
  }
#-}

